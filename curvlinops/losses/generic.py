"""Losses without a closed form: sums or means over samples."""

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from curvlinops.autodiff.backward import NoDerivativeError, vjp
from curvlinops.autodiff.custom_functions import Gradient, check_derivative, directions
from curvlinops.autodiff.evaluation import IsolatedModules
from curvlinops.autodiff.linear import Linear
from curvlinops.autodiff.used_modules import find_modules
from curvlinops.losses.base import DependentLossError, Loss
from curvlinops.support.autograd_graph import custom_functions, graph_nodes
from curvlinops.support.norms import double_norm, wide
from curvlinops.support.pytree import copy_containers, select_samples
from curvlinops.support.refusals import lacks_memory
from curvlinops.support.warnings import first_line, warn

Tensors = Mapping[str, Tensor]

#: Largest difference of a loss and the sum of its samples' losses, relative to their absolute
#: values; 5e-2 in half precision.
_TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-4}


class AdditiveLoss(Loss):
    """Any loss that adds up, or averages, over the samples.

    A term is one sample, and l_t is the loss of this sample alone. Where one batch is all data and
    only L matters, samples may interact, as in contrastive losses. Derivatives with respect to the
    output are PyTorch's, of the loss of the whole batch. For a loss that needs the graph of the
    output, additivity is not checked, since it cannot be evaluated on single samples.

    The modules of the loss are restored after each evaluation, so that a moving average does not
    depend on the number of evaluations.
    """

    is_function_of_values = False

    def __init__(self, module: Any, reduction: str):
        super().__init__(module, reduction)
        self.modules = [*chain(*find_modules(module))]

    def check(self, output: Tensor, target: Any) -> None:
        """Accept everything; the user's loss raises its own errors."""

    def check_values(self, output: Tensor, target: Any, is_all: bool = False) -> None:
        """Compare the batch's loss with its samples' losses, and warn if it has no gradient."""
        output = output.detach()
        if is_all and self.needs_graph:
            return
        try:
            samples = None if is_all else self._one_by_one(output, target)
        except RuntimeError as error:
            if self.needs_graph and not lacks_memory(error):
                return
            raise
        with torch.enable_grad():
            total = self.sum(output.requires_grad_(), target)
        if len(output) and not total.requires_grad:
            warn(
                f"{self.name} has no gradient with respect to the model's output, so that its "
                "curvature is zero. It may compute without gradients, or with decisions (argmax)."
            )
        total = total.detach()
        if samples is None or not total.isfinite():  # which is refused by the batch's number
            return
        # the loss may compute in lower precision than its input or its value
        tolerance = max(_TOLERANCES.get(x.dtype, 5e-2) for x in (total, output))
        error = abs(float(total) - float(samples.sum()))
        if not error <= tolerance * float(samples.abs().sum()) + 1e-12:
            raise ValueError(
                f"{self.name} is not the {self.reduction} of its samples' losses: the "
                f"{len(samples)} rows of a batch's output have {float(total):.6g} in total, but "
                f"{float(samples.sum()):.6g} if evaluated one by one. Curvature is defined for "
                "losses that add up over samples only (not for contrastive or Dice losses, random "
                "ones, or means over a varying number of valid entries; return their sum with "
                "reduction='sum'). If the loss compares rows of a sample, as of N pairs in 2 N "
                "rows, let the model return [N, 2]. Of one batch that is all data, data=[(X, y)], "
                "Hessian and GGN are defined for all but random ones. If the loss does add up, "
                "check reduction=, and make a tensor for all samples, such as a weight for each "
                "class, an attribute of the loss."
            )

    def _one_by_one(self, output: Tensor, target: Any) -> Tensor:
        """Return the losses of single samples, ``[N]``, float64."""
        num_samples = len(output)
        values = torch.zeros(num_samples, dtype=torch.float64, device=output.device)
        try:
            for n in range(num_samples):
                one = select_samples(target, slice(n, n + 1), num_samples)
                values[n] = self._value(output[n : n + 1], one).detach()
        except Exception as error:
            if lacks_memory(error):
                raise
            note = (
                f"{self.name} was evaluated on one sample, to check that it adds up over samples "
                "(contrastive losses do not). Each tensor of the target whose first axis has the "
                "batch's length was cut. A tensor for all samples, such as a weight for each "
                "class, must be an attribute of the loss; a tensor for single samples, such as a "
                "weight for each sample, must be in the target."
            )
            if isinstance(error, ValueError):  # the risk repeats its text, without notes
                raise ValueError(f"{error} {note}") from error
            error.add_note(note)
            raise
        return values

    def sum(self, output: Tensor, target: Any) -> Tensor:
        """Return the sum over all samples."""
        if output.shape[0] == 0:  # the mean of nothing is not a number
            return output.sum()
        value = self._value(output, target)
        return value * output.shape[0] if self.reduction == "mean" else value

    def denominator(self, output: Tensor, target: Any) -> Tensor:
        """Return the number of samples."""
        return torch.tensor(output.shape[0], device=output.device)

    def to_terms(self, columns: Tensor) -> Tensor:
        """Flatten all axes of a sample."""
        return wide(columns.unsqueeze(2) if columns.ndim == 2 else columns.flatten(2))

    def differentiable_gradient(self, output: Tensor, target: Any) -> Tensor:
        """Return the gradient of ``sum``, by PyTorch."""
        return self._differentiated(output, target)[0]

    def _differentiated(self, output: Tensor, target: Any) -> tuple[Tensor, set[str]]:
        """Return ``differentiable_gradient``, and the user's autograd functions in the loss."""
        with torch.enable_grad():
            total = self.sum(output, target)
            if not total.requires_grad:
                return torch.zeros_like(output), set()
            gradient = torch.autograd.grad(
                total, output, create_graph=True, allow_unused=True, materialize_grads=True
            )[0]
            return gradient, custom_functions(graph_nodes(total))

    def _target_rows(self, output: Tensor, target: Any) -> tuple[Tensor, Any]:
        """Return output and target as the user's loss takes them."""
        self._check_dependence()
        return output.detach().requires_grad_(), target

    def _gradient(self, z: Tensor, y: tuple[Tensor, Any]) -> Tensor:
        return self.to_terms(self.differentiable_gradient(*y).detach().unsqueeze(0))[0]

    def _hessian(self, z: Tensor, y: tuple[Tensor, Any]) -> Linear:
        output, target = y
        gradient, functions = self._differentiated(output, target)

        def product(column: Tensor) -> Tensor:
            if not gradient.requires_grad:  # a linear loss
                return torch.zeros_like(column)
            return self._vjp(gradient, column, output)

        if functions and len(output):
            self._compare(product, output.detach(), target, functions)

        def multiply(v: Tensor) -> Tensor:
            columns = self.from_terms(v, output)
            return self.to_terms(torch.stack([product(column) for column in columns]))

        return Linear(multiply, (output, gradient))

    def _compare(self, product: Callable, output: Tensor, target: Any, functions: set[str]) -> None:
        """Compare a Hessian product of a loss with custom functions with central differences."""
        remedy = (
            "The backward of a custom autograd.Function in the loss (one of "
            f"{', '.join(sorted(functions))}) may not be differentiable, as in fused losses that "
            "compute their gradient in the forward pass. Use the loss of PyTorch, such as "
            "torch.nn.CrossEntropyLoss."
        )
        what = f"The product with the Hessian of {self.name}"

        def function(z: Tensors) -> Tensors:
            leaf = z[""].clone().requires_grad_()
            return {"": self.differentiable_gradient(leaf, target).detach()}

        def norms(gradient: Tensors) -> Tensor:
            """Return a norm for each entry of the samples."""
            return double_norm(gradient[""].reshape(len(output), -1), 0)

        at = {"": output}
        near = dict(directions(at, at, seed=0))
        gradient = Gradient(at, near, function, lambda v: {"": product(v[""])}, norms)
        check_derivative(gradient, [output.dtype], what, remedy)

    def _vjp(self, gradient: Tensor, column: Tensor, leaf: Tensor) -> Tensor:
        """Return ``column^T d gradient / d leaf``, differentiable with respect to the column."""
        try:
            with torch.enable_grad():
                product = vjp({"": gradient}, {"": column}, {"": leaf})[""]
        except RuntimeError as error:
            if lacks_memory(error):
                raise
            raise NoDerivativeError(
                f"PyTorch cannot differentiate {self.name} twice: {first_line(error)}. "
                "Write the loss as a function of differentiable operations."
            ) from error
        return torch.zeros_like(leaf) if product is None else product

    def _check_dependence(self) -> None:
        if self.needs_graph:
            raise DependentLossError(
                f"{self.name} is not a function of the model's output and the target alone: it "
                "differentiates the output, or uses the parameters itself. The Hessian, gradients, "
                "and the empirical Fisher are defined; the GGN, its diagonal, and Kronecker "
                "factors (of the empirical Fisher, too) are not. Let the model return the "
                "derivatives, and add weight decay to an operator by damped(delta)."
            )

    def _value(self, output: Tensor, target: Any) -> Tensor:
        with IsolatedModules(self.modules, keep_graphs=True).active():
            # a copy, since some losses overwrite the output
            value = self.module(output.clone(), copy_containers(target))
        if not isinstance(value, Tensor) or value.numel() != 1 or value.is_complex():
            is_tensor = isinstance(value, Tensor)
            found = (value.dtype, list(value.shape)) if is_tensor else type(value).__name__
            raise ValueError(
                f"{self.name} must return a real scalar tensor, the {self.reduction} over the "
                f"batch; got {found}."
            )
        return value.reshape(())
