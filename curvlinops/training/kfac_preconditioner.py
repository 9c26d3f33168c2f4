"""KFAC as a preconditioner of the gradients in a training loop."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from curvlinops.autodiff.model import eval_mode
from curvlinops.linear_operator.operator import TorchLinearOperator
from curvlinops.operators.kfac.kfac import KroneckerFactoredLinearOperator
from curvlinops.support.arguments import check_count, check_number

_ORDER = "Call preconditioner.step(X, y) after loss.backward() and before optimizer.step()."


class KFACPreconditioner:
    """Replaces gradients by KFAC's directions, between ``backward()`` and ``optimizer.step()``.

    The gradient g of the parameters of ``K`` becomes ``nu d`` with
    ``d = (K + damping * I)^{-1} g``. The factors of ``K`` are exponentially weighted means over
    batches. A step along d changes the predictions by about ``lr^2 d^T g / 2``, measured by the
    Kullback-Leibler divergence; ``nu = min(1, sqrt(clip / (lr^2 d^T g)))`` bounds that (Ba et al.,
    Distributed second-order optimization using Kronecker-factored approximations, ICLR 2017).

    Parameters of the optimizer that ``K`` does not have keep their gradients. For a parameter
    of ``K``, a missing gradient counts as zero, and it gets no direction.

    The factors are those of the model in eval mode: ``K`` refuses batch normalization in train
    mode, which couples samples, and dropout. So build ``K`` in eval mode; ``step`` enters it for
    updates, and restores all train flags.

    Args:
        K: A ``KFACLinearOperator``, on the first batch, say. An ``EKFACLinearOperator`` keeps the
            eigenvectors of the first step. If each process has batches of its own, as with
            ``DistributedDataParallel``, build ``K`` with a ``process_group``; otherwise the
            processes' directions differ.
        optimizer: The optimizer that makes the steps. Its learning rates are read.
        damping: The number that is added to all eigenvalues of ``K``, in units of the loss. A
            new ``preconditioner.damping`` counts from the next inverse on.
        update_every: Steps from one update of the factors to the next.
        invert_every: Steps from one inverse to the next.
        decay: The weight of earlier batches at an update, as in ``K.update``.
        clip: The bound of ``lr^2 d^T g``, a positive number; ``None``: no bound.

    Attributes:
        num_steps: The number of calls of ``step``.

    Raises:
        TypeError: If ``K`` is neither KFAC nor EKFAC.
        ValueError: If a number is out of range, or the optimizer lacks a parameter of ``K``.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from curvlinops import KFACLinearOperator
        >>> from curvlinops.training import KFACPreconditioner
        >>> model, loss_func = nn.Linear(4, 3), nn.CrossEntropyLoss()
        >>> params, X, y = list(model.parameters()), torch.randn(8, 4), torch.randint(3, (8,))
        >>> optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
        >>> K = KFACLinearOperator(model, loss_func, params, [(X, y)])
        >>> preconditioner = KFACPreconditioner(K, optimizer)
        >>> loss_func(model(X), y).backward()
        >>> preconditioner.step(X, y)
        >>> optimizer.step()
    """

    def __init__(
        self,
        K: KroneckerFactoredLinearOperator,
        optimizer: Optimizer,
        damping: float = 0.1,
        *,
        update_every: int = 10,
        invert_every: int = 10,
        decay: float = 0.95,
        clip: float | None = 1e-2,
    ):
        if not isinstance(K, KroneckerFactoredLinearOperator):
            raise TypeError(
                f"K must be a KFACLinearOperator or an EKFACLinearOperator, got {type(K).__name__}."
            )
        params = list(K.params.values() if isinstance(K.params, Mapping) else K.params)
        self.K, self.optimizer = K, optimizer
        self.damping = check_number("damping", damping, at_least=0.0)
        self.decay = check_number("decay", decay, at_least=0.0)
        if self.decay > 1.0:
            raise ValueError(f"decay must be between 0 and 1, got {decay}.")
        self.update_every = check_count("update_every", update_every)
        self.invert_every = check_count("invert_every", invert_every)
        self.clip = None if clip is None else check_number("clip", clip, at_least=0.0)
        if self.clip == 0.0:
            raise ValueError("clip must be positive, got 0.0. None: no bound.")
        self.num_steps = 0
        self._params = dict(zip(K.space.names, params, strict=True))
        self._inverse: TorchLinearOperator | None = None
        self._learning_rates()  # knows all parameters
        #: The gradients that the optimizer has used, and the versions that it has used.
        self._used = used = WeakTensorKeyDictionary()

        def note(optimizer: Optimizer, *_: Any) -> None:
            grads = (p.grad for group in optimizer.param_groups for p in group["params"])
            used.update({grad: grad._version for grad in grads if grad is not None})

        with suppress(AttributeError):  # an optimizer of another package may have no hooks
            getattr(optimizer, "optimizer", optimizer).register_step_post_hook(note)

    @torch.no_grad()
    def step(self, X: Any, y: Any) -> None:
        """Replace the gradients, after an update of the factors or a new inverse, if it is time.

        Args:
            X: The inputs of the batch of the gradients, or of a part of this batch. They are read
                at each ``update_every``-th call only.
            y: Its targets.

        Raises:
            ValueError: If all gradients are missing, or were used by the optimizer before; if a
                gradient is sparse or not finite, or ``K`` is singular and not damped.
            NotImplementedError: If a parameter of ``K`` has no Kronecker product: build ``K``
                without it, or with a ``fallback``.
        """
        grads = {name: p.grad for name, p in self._params.items() if p.grad is not None}
        self._check(grads)
        if self.num_steps % self.update_every == 0:
            with eval_mode(self.K.model_func):
                self.K.update((X, y), self.decay)
        if self._inverse is None or self.num_steps % self.invert_every == 0:
            self._inverse = self.K.inverse(self.damping, use_exact_damping=True)
        self.num_steps += 1
        zeros = {n: torch.zeros_like(p) for n, p in self._params.items() if p.grad is None}
        directions = self._inverse @ (grads | zeros)
        nu: Tensor | float = 1.0
        if self.clip is not None:
            rates = self._learning_rates()
            terms = [rates[n] ** 2 * (grad * directions[n]).sum() for n, grad in grads.items()]
            nu = (self.clip / torch.stack(terms).sum()).sqrt().clamp(max=1.0)
        for name, grad in grads.items():
            grad.copy_(nu * directions[name])

    def _check(self, grads: Mapping[str, Tensor]) -> None:
        """Refuse gradients that are missing, sparse, or of the step before."""
        if not grads:
            raise ValueError(f"No parameter of K has a gradient. {_ORDER}")
        if all(self._used.get(grad) == grad._version for grad in grads.values()):
            raise ValueError(f"The optimizer has made a step with these gradients. {_ORDER}")
        for name, grad in grads.items():
            if grad.layout != torch.strided:
                raise ValueError(
                    f"The gradient of {name!r} is sparse. Take sparse=False, or build K without "
                    "this parameter."
                )

    def _learning_rates(self) -> dict[str, Any]:
        """Return the learning rate of each parameter."""
        groups = self.optimizer.param_groups
        rates = {id(p): group["lr"] for group in groups for p in group["params"]}
        if lacking := [name for name, p in self._params.items() if id(p) not in rates]:
            raise ValueError(
                f"The optimizer lacks parameters of K, such as {lacking[0]!r}. Build K with the "
                "parameters that the optimizer trains, or fewer."
            )
        return {name: rates[id(p)] for name, p in self._params.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the factors and the number of steps, for a checkpoint.

        The tensors share memory with ``K``: save them, or copy them, before the next step.
        """
        with eval_mode(self.K.model_func):
            return {"num_steps": self.num_steps, "factors": self.K.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a checkpoint; the next step computes the inverse from its factors.

        Directions are then those of the run without a break, bit for bit, if ``invert_every`` and
        ``update_every`` are the same. Otherwise the inverse may be of newer factors. Those of other
        parameters, options, or another loss are refused.
        """
        with eval_mode(self.K.model_func):
            self.K.load_state_dict(state_dict["factors"])
        self.num_steps, self._inverse = state_dict["num_steps"], None
