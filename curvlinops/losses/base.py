"""The interface of losses: their terms, with derivatives and samples."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from curvlinops.autodiff.backward import canonical
from curvlinops.autodiff.linear import Linear
from curvlinops.losses.factored import FactoredHessian
from curvlinops.support.arguments import PLAIN
from curvlinops.support.torch_internals import without_torch_function

#: The losses in closed form, by their PyTorch module; filled in ``__init__.py``.
KNOWN_LOSSES: dict[type[nn.Module], type["Loss"]] = {}


class DependentLossError(ValueError):
    """A loss depends on more than the output's values, and has no derivative with respect to it."""


class Loss(ABC):
    """A loss as a sum over terms, ``L = c * sum_t l_t``.

    A term depends on C entries of the model's output, one *row*. Subclasses turn outputs into rows
    z, ``[T, C]``, and targets into y; formulas are for z and y. They leave out the scale ``c``,
    which is 1 for ``"sum"``, and one over the sum of ``denominator`` over the data for ``"mean"``.
    Factors inside of ``l_t``, such as 1/C of the squared error, depend on the reduction, too.

    Formulas for outputs in half precision are evaluated in float32.

    Args:
        module: The user's loss.
        reduction: ``"sum"`` or ``"mean"``.
    """

    #: The modules that the user's loss uses, if it has no closed form, children included.
    modules: Sequence[nn.Module] = ()
    #: Whether the value depends on more than the values of output and target: the loss
    #: differentiates the output with respect to the input (a PINN), or uses the parameters itself
    #: (weight decay). Then there are no derivatives with respect to the output alone.
    needs_graph = False
    #: Whether the loss is known to depend on the values of output and target alone.
    is_function_of_values = True
    #: Whether the loss is linear in the output, so that its output Hessian is zero.
    is_linear = False
    #: Whether the loss uses parameters of the model. If these are differentiated, the loss needs
    #: the graph, and the GGN is the Hessian of ``curvature_sum``.
    has_parameters = False
    #: Whether the loss is a negative log-likelihood whose labels ``sample`` draws.
    can_sample = False

    def __init__(self, module: Any, reduction: str):
        self.module = module
        self.reduction = reduction

    @property
    def name(self) -> str:
        """The name of the user's loss."""
        function = self.module.func if isinstance(self.module, partial) else self.module
        return getattr(function, "__name__", type(function).__name__)

    @property
    def description(self) -> tuple:
        """Class, name, reduction, and those options of the loss that are plain values."""
        if isinstance(self.module, partial):
            found = self.module.keywords
        else:
            found = getattr(self.module, "__dict__", {})
        options = {n: v for n, v in found.items() if isinstance(v, PLAIN) and n != "training"}
        return type(self).__name__, self.name, self.reduction, options

    def to(self, device: torch.device | str) -> None:
        """Move the loss's tensors, such as class weights, to another device."""
        if isinstance(self.module, nn.Module):
            self.module.to(device)

    @abstractmethod
    def check(self, output: Tensor, target: Any) -> None:
        """Raise ValueError if output and target do not fit."""

    def check_values(self, output: Tensor, target: Any, is_all: bool = False) -> None:
        """Raise ValueError if a batch, unless it is all data, has no sum over terms as its loss."""
        return None

    @abstractmethod
    def sum(self, output: Tensor, target: Any) -> Tensor:
        """Return ``sum_t l_t`` over the batch, differentiable."""

    def curvature_sum(self, output: Tensor, target: Any) -> Tensor:
        """Return a sum whose Hessian with respect to all parameters is the GGN."""
        raise NotImplementedError

    @abstractmethod
    def denominator(self, output: Tensor, target: Any) -> Tensor:
        """Return the batch's share of ``1 / c`` under ``"mean"``, a scalar."""

    def term_size(self, output: Tensor) -> int | None:
        """Return C if it must be equal in all batches, else ``None``."""
        return None

    @abstractmethod
    def to_terms(self, columns: Tensor) -> Tensor:
        """Turn columns ``[K, *output]`` into rows ``[K, T, C]``, in float32 or wider."""

    def from_terms(self, rows: Tensor, output: Tensor) -> Tensor:
        """Turn rows ``[K, T, C]`` into columns ``[K, *output]`` of its dtype; undo ``to_terms``."""
        return rows.reshape(rows.shape[0], *output.shape).to(output.dtype)

    def gradient(self, output: Tensor, target: Any) -> Tensor:
        """Return the gradient of ``sum`` w.r.t. the output, ``[*output]``."""
        return self._gradient_at(self._rows(output, target), output)

    def differentiable_gradient(self, output: Tensor, target: Any) -> Tensor:
        """Return ``gradient`` as a function of the output, with ``hessian`` as its derivative."""
        z = output.detach()
        rows = self._rows(z, target)
        value, multiply = self._gradient_at(rows, z), self._hessian_at(rows, z)
        return _WithDerivative.apply(output, value, multiply)

    def hessian(self, output: Tensor, target: Any) -> Linear:
        """Return products of ``[K, *output]`` with the Hessian of ``sum`` w.r.t. the output."""
        return self._hessian_at(self._rows(output, target), output)

    def hessian_sqrt(
        self,
        output: Tensor,
        target: Any,
        minimal: bool = False,
        columns: slice = slice(None),
    ) -> Tensor:
        """Return S, ``[V, *output]``, with ``sum_v S_v S_v^T`` the Hessian of l_t in each term.

        V = C, or as few as suffice if ``minimal``; ``columns`` are the numbers v of those wanted.
        Indefinite Hessians, of negative weights or targets, are refused.
        """
        z, y = self._rows(output, target)
        some = slice(*columns.indices(z.shape[1]))
        return self.from_terms(self._hessian_sqrt(z, y, minimal, some), output)

    def factored_hessian(self, output: Tensor, target: Any) -> FactoredHessian | None:
        """Return the Hessians of all l_t in factors; ``None`` if they are not of that form."""
        return self._factored_hessian(*self._rows(output, target))

    def sample(
        self, output: Tensor, target: Any, num_samples: int, generator: torch.Generator
    ) -> Tensor:
        """Draw would-be gradients ``[num_samples, *output]``.

        Terms are independent. In each, the expectation of the outer product is the Hessian of l_t,
        for all weights, label smoothing and targets. If that Hessian depends on the target
        (BCELoss), it is the expectation of the Hessian over labels of the model.
        """
        self.check_can_sample()
        rows = self._sample(*self._rows(output, target), num_samples, generator)
        return self.from_terms(rows, output)

    def check_can_sample(self) -> None:
        """Raise NotImplementedError if the loss has no likelihood to sample from."""
        if not self.can_sample:
            raise NotImplementedError(
                f"{self.name} is not known as a negative log-likelihood whose labels could be "
                f"sampled. {_supported()}"
            )

    def outer(self, vectors: Tensor, output: Tensor) -> Linear:
        """Return products with the mean outer product of vectors ``[M, *output]``, by term."""
        return self._on_output(outer(self.to_terms(vectors)), output)

    # --- formulas

    def _rows(self, output: Tensor, target: Any) -> tuple[Tensor, Any]:
        """Return the rows z of an output, ``[T, C]``, and y."""
        return self.to_terms(output.unsqueeze(0))[0], self._target_rows(output, target)

    def _gradient_at(self, rows: tuple[Tensor, Any], output: Tensor) -> Tensor:
        """Return ``gradient``, given z and y."""
        # targets may require gradients
        return self.from_terms(self._gradient(*rows).unsqueeze(0), output)[0].detach()

    def _hessian_at(self, rows: tuple[Tensor, Any], output: Tensor) -> Linear:
        """Return ``hessian``, given z and y."""
        return self._on_output(self._hessian(*rows), output)

    def _on_output(self, multiply: Linear, output: Tensor) -> Linear:
        """Return a function of rows ``[K, T, C]`` as one of columns ``[K, *output]``."""

        def product(v: Tensor) -> Tensor:
            return self.from_terms(multiply(self.to_terms(v)), output)

        return Linear(product, (output, *multiply.tensors))

    @abstractmethod
    def _target_rows(self, output: Tensor, target: Any) -> Any:
        """Return y, the part of the target that the formulas need."""

    @abstractmethod
    def _gradient(self, z: Tensor, y: Any) -> Tensor:
        """Return the terms' gradients ``[T, C]``."""

    @abstractmethod
    def _hessian(self, z: Tensor, y: Any) -> Linear:
        """Return products of ``[K, T, C]`` with the terms' Hessians, and the tensors they need."""

    def _hessian_sqrt(self, z: Tensor, y: Any, minimal: bool, columns: slice) -> Tensor:
        """Return some columns of the square roots of the terms' Hessians, ``[V, T, C]``."""
        hessian = self._factored_hessian(z, y)
        if hessian is None:
            remedy = (
                "Sample labels (fisher_type='mc', mc_samples=), or take a loss that has one, such "
                "as torch.nn.CrossEntropyLoss of the logits."
            )
            raise NotImplementedError(
                f"{self.name} has no closed-form square root of its Hessian. "
                f"{remedy if self.can_sample else _supported()}"
            )
        return hessian.columns(columns, minimal)

    def _factored_hessian(self, z: Tensor, y: Any) -> FactoredHessian | None:
        """Return the terms' Hessians in factors, if they are of that form."""
        return None

    def _sample(self, z: Tensor, y: Any, num_samples: int, generator: torch.Generator) -> Tensor:
        """Return would-be gradients ``[num_samples, T, C]``, if the loss can sample."""
        raise NotImplementedError

    def _sqrt(self, *summands: Tensor) -> Tensor:
        """Return the square root of a sum of curvatures, none of which may be negative."""
        if any(bool((x < 0).any()) for x in summands):
            raise ValueError(
                f"{self.name} has a negative curvature in at least one term (negative weights or "
                "counts, or probabilities outside [0, 1]): it has no real square root and no "
                "likelihood."
            )
        return sum(summands).sqrt()


def _supported() -> str:
    """Return the losses with samples or square roots, and operators for the others."""
    sampled = [module.__name__ for module, kind in KNOWN_LOSSES.items() if kind.can_sample]
    others = [
        module.__name__
        for module, kind in KNOWN_LOSSES.items()
        if not (kind.can_sample or kind.is_linear)
    ]
    return (
        f"Supported are {', '.join(sampled)}, and without sampling (fisher_type='type-2') "
        f"{', '.join(others)}, but not subclasses with a forward method of their own, and not "
        "modules with forward hooks. KFAC and EKFAC with fisher_type='empirical', and "
        "EFLinearOperator, support every loss; GGNLinearOperator supports every twice "
        "differentiable function of the model's output and the target."
    )


def conversion_of(target: Any) -> str:
    """Return how to make a tensor of a target, for messages."""
    return " Pass torch.as_tensor(y)." if isinstance(target, np.ndarray | list) else ""


def outer(rows: Tensor) -> Linear:
    """Return products of ``[K, T, C]`` with the mean over M of ``rows[m, t] rows[m, t]^T``."""

    def multiply(v: Tensor) -> Tensor:
        inner = torch.einsum("mtc,ktc->kmt", rows, v) / rows.shape[0]
        return torch.einsum("kmt,mtc->ktc", inner, rows)

    return Linear(multiply, (rows,))


def constant(option: Tensor | None, like: Tensor) -> Tensor | None:
    """Return a tensor option of a loss, such as weights, with device and dtype of ``like``."""
    if option is None:
        return None
    option = option.detach().to(like)
    # autograd refuses tensors that were made in inference mode
    return option.clone() if option.is_inference() else option


class _WithDerivative(torch.autograd.Function):
    """A function of x that has a given value and a given symmetric derivative.

    ``apply(x, value, multiply)`` returns ``value``, of the shape of x. Its derivative multiplies
    vectors ``[K, *x]`` by ``multiply``.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, multiply: Linear) -> Tensor:
        """Return the value."""
        ctx.multiply = multiply
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor, None, None]:
        """Multiply by the derivative."""
        with without_torch_function():  # evaluations record the function calls of the model
            return canonical(ctx.multiply(v.unsqueeze(0)).squeeze(0)), None, None
