"""Cross-entropy of the logits of a linear head, computed from the head's inputs in chunks.

Only the logits of one chunk of positions are in memory. Value, gradient and products with the
Hessian have closed forms, each of which computes the logits again.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvlinops.autodiff.linear import Linear
from curvlinops.losses.base import DependentLossError
from curvlinops.losses.cross_entropy import CrossEntropy, IndexLoss
from curvlinops.support.devices import entries_at_once
from curvlinops.support.norms import wide
from curvlinops.support.torch_internals import modules_of

#: Logits in a chunk on the CPU.
_CHUNK = 2**22


class LinearCrossEntropyLoss(nn.Module):
    """Cross-entropy of ``head(x)`` with targets, without the logits of all positions at once.

    The loss and all matrices equal those of ``CrossEntropyLoss()`` on the logits. The GGN is the
    one with respect to the logits. The model returns x, the inputs of its own head. Parameters of
    the head may be in ``params`` for Hessian, GGN, gradients and gradients of samples.

    Args:
        head: The model's head, a linear layer, which maps ``[N, ..., d]`` to ``[N, ..., V]``.
        ignore_index: The target of positions that do not count.
        reduction: ``"mean"`` over the positions that count, or ``"sum"``.
        chunk_size: Number of positions whose logits are in memory at once. Default: as many as
            have four million logits.

    Raises:
        TypeError: If the head is no linear layer.
        ValueError: If the reduction is unknown, or ``chunk_size`` is not positive.
    """

    def __init__(
        self,
        head: nn.Linear,
        ignore_index: int = -100,
        reduction: str = "mean",
        chunk_size: int | None = None,
    ):
        super().__init__()
        if type(head) is not nn.Linear:
            raise TypeError(f"head must be a torch.nn.Linear, got {type(head).__name__}.")
        if reduction not in ("mean", "sum"):
            raise ValueError(f"reduction is {reduction!r}, expected 'sum' or 'mean'.")
        if chunk_size is not None and chunk_size < 1:
            raise ValueError(f"chunk_size must be positive, got {chunk_size}.")
        self.head, self.ignore_index = head, ignore_index
        self.reduction, self.chunk_size = reduction, chunk_size
        self._is_compared = False

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Return the loss of inputs ``[N, ..., d]`` and targets ``[N, ...]``.

        Raises:
            ValueError: If the head returns other logits, in the first call.
        """
        loss = LinearCrossEntropy(self, self.reduction)
        if not self._is_compared:
            loss.check(input, target)
            loss.check_values(input, target)
            self._is_compared = True
        value = loss.sum(input, target)
        return value if self.reduction == "sum" else value / loss.denominator(input, target)


class LinearCrossEntropy(IndexLoss):
    """``LinearCrossEntropyLoss``. A row is the head's input at a position."""

    can_sample = has_parameters = True
    is_function_of_values = False

    def __init__(self, module: LinearCrossEntropyLoss, reduction: str):
        super().__init__(module, reduction)
        self.modules = modules_of([module])

    def check(self, output: Tensor, target: Tensor) -> None:
        """Require inputs of the head, and one index for each position."""
        head, positions = self.module.head, tuple(output.shape[:-1])
        if output.ndim < 2 or output.shape[-1] != head.in_features:
            raise ValueError(
                f"{self.name} needs the inputs [N, ..., {head.in_features}] of the head as the "
                f"model's output, got {list(output.shape)}."
            )
        self._check_indices(output, target, positions, head.out_features)

    def check_values(self, output: Tensor, target: Any, is_all: bool = False) -> None:
        """Compare one chunk of logits with what the head returns."""
        head, x = self.module.head, output.detach().flatten(0, -2)[: self._size(output)]
        with torch.no_grad():
            logits, found = F.linear(x, head.weight, head.bias), head(x)
        eps = torch.finfo(x.dtype).eps
        if found.shape != logits.shape or not (found - logits).norm() <= 16 * eps * logits.norm():
            raise ValueError(
                f"{self.name} takes x @ weight.T + bias for the logits, but the head returns "
                "others: it has hooks that change them, or another forward (a temperature, a soft "
                "cap). Take torch.nn.CrossEntropyLoss of the logits, or move such a change of the "
                "inputs into the model."
            )

    def sum(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the sum over all terms."""
        return self._sum(output, target)

    def curvature_sum(self, output: Tensor, target: Tensor) -> Tensor:
        """Return ``l(z) - <g, z>``, summed over all terms, with g the gradient at the logits z.

        g is constant. The gradient is zero, so that no second derivative of z is left: the Hessian
        with respect to any parameters is the GGN, also with respect to the head's.
        """
        return self._sum(output, target, is_curvature=True)

    def _sum(self, output: Tensor, target: Tensor, is_curvature: bool = False) -> Tensor:
        self.check(output, target)  # the sum is computed before others check
        head, y = self.module.head, self._target_rows(output, target)
        terms = _Terms(*y, self._size(output), is_curvature)
        return _Sum.apply(output.flatten(0, -2), head.weight, head.bias, terms)

    def _size(self, output: Tensor, num_columns: int = 1) -> int:
        """Return the number of positions in a chunk."""
        entries = entries_at_once(output, _CHUNK) // self.module.head.out_features
        return max((self.module.chunk_size or entries) // num_columns, 1)

    def denominator(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the number of terms."""
        return (target != self.module.ignore_index).sum()

    def to_terms(self, columns: Tensor) -> Tensor:
        """Flatten all axes but the last."""
        return wide(columns.flatten(1, -2))

    def _rows(self, output: Tensor, target: Tensor) -> tuple[Tensor, Any]:
        if self.needs_graph:
            raise DependentLossError(
                f"params has parameters of the head of {self.name}. Then Hessian, GGN, gradients "
                "and gradients of samples are defined, but neither sampled labels nor Kronecker "
                "factors. Leave the head (and a table of tokens that is tied to it) out of params, "
                "or take torch.nn.CrossEntropyLoss of the logits."
            )
        return output.flatten(0, -2), self._target_rows(output, target)

    def _target_rows(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return self._indices(target)

    # --- formulas for a head that is constant

    def _head(self) -> tuple[Tensor, Tensor | None]:
        head = self.module.head
        return head.weight.detach(), None if head.bias is None else head.bias.detach()

    def _gradient(self, z: Tensor, y: tuple[Tensor, Tensor]) -> Tensor:
        terms = _Terms(*y, self._size(z))
        return wide(_gradients(z, *self._head(), z.new_ones(()), terms, of_head=False)[0])

    def _hessian(self, z: Tensor, y: tuple[Tensor, Tensor]) -> Linear:
        weight, bias = self._head()

        def multiply(v: Tensor) -> Tensor:
            terms, parts = _Terms(*y, self._size(z, len(v))), []
            for at, logits in terms.chunks(z, weight, bias):
                u = F.linear(v[:, at].to(z.dtype), weight)
                parts.append(terms.product(at, logits, u) @ weight)
            return wide(torch.cat(parts, 1)) if parts else v

        return Linear(multiply, (z, *y))

    def _sample(
        self, z: Tensor, y: tuple[Tensor, Tensor], num_samples: int, generator: torch.Generator
    ) -> Tensor:
        (weight, bias), parts = self._head(), [z.new_zeros(num_samples, 0, z.shape[1])]
        terms = _Terms(*y, self._size(z, num_samples))
        for at, logits in terms.chunks(z, weight, bias):
            drawn = _OF_LOGITS._sample(logits, terms.targets(at), num_samples, generator)
            parts.append(drawn.to(z.dtype) @ weight)
        return wide(torch.cat(parts, 1))


# --- the head in chunks

#: The formulas of logits.
_OF_LOGITS = CrossEntropy(nn.CrossEntropyLoss(reduction="sum"), "sum")


class _Terms(NamedTuple):
    """The targets of all positions, and how the sum over them is computed."""

    indices: Tensor  # the targets, [T]
    kept: Tensor  # which of them count
    size: int  # the number of positions in a chunk
    is_curvature: bool = False  # whether to subtract gradients at logits, see curvature_sum

    def targets(self, at: slice) -> tuple[Tensor, Tensor]:
        """Return the targets of a chunk."""
        return self.indices[at], self.kept[at]

    def chunks(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Iterator:
        """Yield the positions of each chunk, and its logits, in float32 or wider."""
        for start in range(0, len(x), self.size):
            at = slice(start, start + self.size)
            yield at, wide(F.linear(x[at], weight, bias))

    def gradient(self, at: slice, logits: Tensor) -> Tensor:
        """Return the gradient of a chunk at its logits."""
        return _OF_LOGITS._gradient(logits, self.targets(at))

    def product(self, at: slice, logits: Tensor, v: Tensor) -> Tensor:
        """Return products of ``[K, T, V]`` with the Hessian of a chunk at its logits."""
        return _OF_LOGITS._hessian(logits, self.targets(at))(wide(v)).to(v.dtype)


class _Sum(torch.autograd.Function):
    """The sum of all terms, as a function of x, weight and bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, terms: _Terms) -> Tensor:
        """Return the sum."""
        ctx.save_for_backward(x, weight, bias)
        ctx.terms = terms
        total = wide(x).new_zeros(())
        for at, logits in terms.chunks(x, weight, bias):
            y, kept = terms.targets(at)
            total += F.cross_entropy(logits, y.where(kept, -100), reduction="sum")
        return total

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients."""
        arguments = (*ctx.saved_tensors, g, ctx.terms, any(ctx.needs_input_grad[1:3]))
        call = _Gradients.apply if torch.is_grad_enabled() else _gradients
        return (*call(*arguments), None)


class _Gradients(torch.autograd.Function):
    """The gradients of the sum with respect to x, weight and bias, times g."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor | None, ...]:
        """Return the gradients, given the arguments of ``_gradients``."""
        *tensors, ctx.terms, _ = arguments
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return _gradients(*arguments)

    @staticmethod
    def backward(
        ctx: Any, dx: Tensor | None, dW: Tensor | None, db: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Multiply by the Hessian of the sum, which has a term of the product ``x weight^T``."""
        x, weight, bias, g = ctx.saved_tensors
        terms, (_, of_weight, of_bias, of_g, *_) = ctx.terms, ctx.needs_input_grad
        if not len(x) or (dx is None and dW is None and db is None):
            return (None,) * 6
        parts, total_W, total_b, total_g = [], None, None, None
        for at, logits in terms.chunks(x, weight, bias):
            changes = [] if db is None else [db.expand(logits.shape)]
            changes += [] if dx is None else [dx[at] @ weight.mT]
            changes += [] if dW is None else [x[at] @ dW.mT]
            change = sum(changes[1:], start=changes[0])
            u = terms.product(at, logits, change.unsqueeze(0))[0] * g.to(x.dtype)
            part, part_W = u @ weight, u.mT @ x[at] if of_weight else None
            if not terms.is_curvature:
                r = terms.gradient(at, logits).to(x.dtype)
                total_g = _added(total_g, (r * change).sum()) if of_g else None
                r = r * g.to(x.dtype)
                part = part if dW is None else part + r @ dW
                part_W = part_W + r.mT @ dx[at] if of_weight and dx is not None else part_W
            parts.append(part)
            total_W = _added(total_W, part_W) if of_weight else None
            total_b = _added(total_b, u.sum(0)) if of_bias else None
        totals = (total_W, total_b, total_g)
        pairs = zip(totals, (weight, bias, g), strict=True)
        others = [None if total is None else total.to(like.dtype) for total, like in pairs]
        return (torch.cat(parts), *others, None, None)


def _gradients(
    x: Tensor, weight: Tensor, bias: Tensor | None, g: Tensor, terms: _Terms, of_head: bool
) -> tuple[Tensor | None, ...]:
    """Return the gradients with respect to x, and to weight and bias if they are wanted."""
    head = [weight, bias] if of_head else [None, None]
    if terms.is_curvature or not len(x):
        return tuple(None if like is None else torch.zeros_like(like) for like in (x, *head))
    parts, total_W, total_b = [], None, None
    for at, logits in terms.chunks(x, weight, bias):
        r = (terms.gradient(at, logits) * g).to(x.dtype)
        parts.append(r @ weight)
        if of_head:
            total_W, total_b = _added(total_W, r.mT @ x[at]), _added(total_b, r.sum(0))
    pairs = zip((total_W, total_b), head, strict=True)
    return (torch.cat(parts), *(None if like is None else x.to(like.dtype) for x, like in pairs))


def _added(total: Tensor | None, part: Tensor) -> Tensor:
    """Return a sum over chunks, in float32 or wider."""
    return wide(part) if total is None else total.add_(wide(part))
