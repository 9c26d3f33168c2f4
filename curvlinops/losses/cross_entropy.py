"""Cross-entropy of logits, and negative log-likelihood of log-probabilities."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from curvlinops.autodiff.linear import Linear
from curvlinops.losses.base import Loss, constant, conversion_of
from curvlinops.losses.factored import FactoredHessian
from curvlinops.support.norms import wide

#: The remedy for outputs with classes on the last axis, for messages.
_CLASSES_LAST = (
    " The output seems to have its classes on the last axis, as models of Hugging Face do: "
    "construct the operator from *curvlinops.integrations.transformers.problem(model, loader), "
    "which also shifts the labels of causal language models; or let the model return "
    "output.movedim(-1, 1)."
)


def _remedy(output: Tensor, target: Tensor, positions: tuple[int, ...]) -> str:
    """Return what to do with a target that does not fit an output, if that is evident."""
    is_column = target.ndim > 1 and target.squeeze(1).shape == positions
    if is_column or target.shape == positions:
        call = f"y{'.squeeze(1)' * is_column}{'.long()' * target.is_floating_point()}"
        return f" Pass {call}."
    if target.shape == output.shape and not target.is_floating_point():
        return " Pass y.argmax(1) for one-hot targets."
    return _CLASSES_LAST if output.ndim > 2 and target.shape == output.shape[:-1] else ""


class IndexLoss(Loss):
    """A loss with the index of a class as target of each position, of which some are ignored."""

    #: Where the output has its classes, for messages.
    where = ""

    def _check_indices(
        self, output: Tensor, target: Any, positions: tuple[int, ...], num_classes: int
    ) -> None:
        """Require one index for each position."""
        if not isinstance(target, Tensor):
            raise ValueError(
                f"{self.name} needs a tensor as target, got a {type(target).__name__}."
                f"{conversion_of(target)}"
            )
        if target.is_floating_point() or tuple(target.shape) != positions:
            raise ValueError(
                f"{self.name} has an output of shape {list(output.shape)}{self.where}, which needs "
                f"integer targets of shape {list(positions)}; got {target.dtype} of shape "
                f"{list(target.shape)}.{_remedy(output, target, positions)}"
            )
        y, _ = self._indices(target)
        if y.numel() and not 0 <= int(y.min()) <= int(y.max()) < num_classes:
            raise ValueError(
                f"{self.name} has targets from {int(y.min())} to {int(y.max())}, but there are "
                f"{num_classes} classes, and ignore_index is {self.module.ignore_index}."
            )

    def _indices(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return all targets ``[T]``, zero where ignored, and which are kept."""
        y = target.reshape(-1).long()
        kept = y != self.module.ignore_index
        return y * kept, kept


class ClassAxisLoss(IndexLoss):
    """A loss of class scores ``[N, C, d1, ...]`` with index targets ``[N, d1, ...]``.

    A term is one position that is not ignored. The rows of ignored positions are zero.
    """

    where = " (classes on axis 1)"

    def check(self, output: Tensor, target: Tensor) -> None:
        """Require class scores on axis 1, and one index for each position."""
        self._check_options(output)
        if output.ndim < 2:
            raise ValueError(
                f"{self.name} needs an output [N, C, ...], got shape {list(output.shape)}."
            )
        positions = (output.shape[0], *output.shape[2:])
        self._check_indices(output, target, positions, output.shape[1])

    def _check_options(self, output: Tensor) -> None:
        weight = self.module.weight
        if weight is not None and weight.shape != output.shape[1:2]:
            raise ValueError(
                f"{self.name} has a weight of shape {list(weight.shape)} for an output of shape "
                f"{list(output.shape)} (classes on axis 1): it needs one number for each class."
            )

    def denominator(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the number of terms, or the sum of their targets' class weights."""
        y, kept = self._indices(target)
        weight = self._weight(wide(output))
        return kept.sum() if weight is None else (weight[y] * kept).sum()

    def to_terms(self, columns: Tensor) -> Tensor:
        """Move the classes last and flatten the other axes."""
        return wide(columns.movedim(2, -1).flatten(1, -2))

    def from_terms(self, rows: Tensor, output: Tensor) -> Tensor:
        """Undo ``to_terms``."""
        num_samples, num_classes, *positions = output.shape
        rows = rows.reshape(rows.shape[0], num_samples, *positions, num_classes)
        return rows.movedim(-1, 2).to(output.dtype)

    def _target_rows(self, output: Tensor, target: Tensor) -> Any:
        """Return indices and which of them are kept, ``[T]``; or probabilities, ``[T, C]``."""
        if _is_soft(output, target):
            return self.to_terms(target.unsqueeze(0).to(wide(output).dtype))[0]
        return self._indices(target)

    def _weight(self, z: Tensor) -> Tensor | None:
        return constant(self.module.weight, z)


class NegativeLogLikelihood(ClassAxisLoss):
    """``l_t = -w_y z_y`` for log-probabilities z: ``torch.nn.NLLLoss``.

    It is linear in the output. The curvature of the softmax belongs to the model.
    """

    is_linear = True

    def sum(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the sum over all terms."""
        z = wide(output)
        return F.nll_loss(
            z,
            target.long(),
            weight=self._weight(z),
            ignore_index=self.module.ignore_index,
            reduction="sum",
        )

    def _gradient(self, z: Tensor, y: tuple[Tensor, Tensor]) -> Tensor:
        indices, kept = y
        weight = self._weight(z)
        value = kept.to(z.dtype) if weight is None else weight[indices] * kept
        return torch.zeros_like(z).scatter(1, indices.unsqueeze(1), -value.unsqueeze(1))

    def _hessian(self, z: Tensor, y: Any) -> Linear:
        return Linear(torch.zeros_like, ())


class CrossEntropy(ClassAxisLoss):
    """``torch.nn.CrossEntropyLoss`` with all its options.

    With target probabilities q (one-hot or given, then smoothed) and class weights w,
    ``l_t = -sum_k w_k q_k log softmax(z)_k``. For ``s = sum_k w_k q_k`` and p = softmax(z), its
    gradient is ``s p - w q`` and its Hessian ``s (diag p - p p^T)``.
    """

    can_sample = True

    def check(self, output: Tensor, target: Tensor) -> None:
        """Also accept probabilities of the output's shape."""
        if not _is_soft(output, target):
            super().check(output, target)
            return
        self._check_options(output)
        if self.module.ignore_index >= 0:
            raise ValueError(
                f"CrossEntropyLoss with ignore_index={self.module.ignore_index} has targets that "
                "are probabilities, which cannot be ignored. Leave ignore_index at its default."
            )

    def _check_options(self, output: Tensor) -> None:
        super()._check_options(output)
        if not 0 <= self.module.label_smoothing <= 1:
            raise ValueError(
                f"label_smoothing must be from 0 to 1, got {self.module.label_smoothing}."
            )

    def sum(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the sum over all terms."""
        z = wide(output)
        return F.cross_entropy(
            z,
            target.to(z.dtype) if target.is_floating_point() else target.long(),
            weight=self._weight(z),
            ignore_index=self.module.ignore_index,
            reduction="sum",
            label_smoothing=self.module.label_smoothing,
        )

    def denominator(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the number of terms; for index targets with weights, the sum of ``w_y``."""
        if _is_soft(output, target):
            return torch.tensor(output.numel() // output.shape[1], device=output.device)
        return super().denominator(output, target)

    def _gradient(self, z: Tensor, y: Any) -> Tensor:
        weighted, p = self._weighted_targets(z, y), z.softmax(1)
        return _balanced(weighted.sum(1, keepdim=True) * p - weighted, p)

    def _hessian(self, z: Tensor, y: Any) -> Linear:
        p = z.softmax(1)
        scaled, top = self._scale(z, y) * p, p.argmax(1, keepdim=True)

        def multiply(v: Tensor) -> Tensor:
            # constants are in the null space; without this one nothing cancels if p is near one-hot
            v = v - v.gather(-1, top.expand(*v.shape[:-1], 1))
            return scaled * (v - (p * v).sum(-1, keepdim=True))

        return Linear(multiply, (p, scaled, top))

    def _factored_hessian(self, z: Tensor, y: Any) -> FactoredHessian:
        p = z.softmax(1)
        return FactoredHessian(self._sqrt(self._scale(z, y)) * p.sqrt(), p, True)

    def _sample(self, z: Tensor, y: Any, num_samples: int, generator: torch.Generator) -> Tensor:
        p = z.softmax(1)
        scale = self._sqrt(self._scale(z, y))
        labels = torch.multinomial(p, num_samples, replacement=True, generator=generator)
        gradients = p.expand(num_samples, *p.shape).clone()
        gradients.scatter_add_(2, labels.T.unsqueeze(-1), -torch.ones_like(gradients[..., :1]))
        return _balanced(gradients.mul_(scale), p)

    def _scale(self, z: Tensor, y: Any) -> Tensor:
        """Return ``s`` of each term, ``[T, 1]``; zero where ignored."""
        if isinstance(y, Tensor):
            return self._weighted_targets(z, y).sum(1, keepdim=True)
        (indices, kept), weight = y, self._weight(z)
        if weight is None:
            return kept.to(z.dtype).unsqueeze(1)
        smoothing = self.module.label_smoothing
        scale = (1 - smoothing) * weight[indices] + smoothing * weight.mean()
        return (scale * kept).unsqueeze(1)

    def _weighted_targets(self, z: Tensor, y: Any) -> Tensor:
        """Return ``w q``, ``[T, C]``; zero where ignored."""
        if isinstance(y, Tensor):
            q, kept = y, None
        else:
            indices, kept = y
            q = torch.zeros_like(z).scatter_(1, indices.unsqueeze(1), 1.0)
        smoothing, weight = self.module.label_smoothing, self._weight(z)
        if smoothing > 0:
            q = (1 - smoothing) * q + smoothing / z.shape[1]
        q = q if weight is None else q * weight
        return q if kept is None else q * kept.unsqueeze(1)


def _is_soft(output: Tensor, target: Any) -> bool:
    """Return whether targets are probabilities."""
    if not isinstance(target, Tensor) or not target.is_floating_point():
        return False
    return target.shape == output.shape


def _balanced(rows: Tensor, p: Tensor) -> Tensor:
    """Recompute the entry of the most likely class in rows ``[..., T, C]`` that add up to zero.

    For a confident model, this entry is a difference of two numbers near one, and inaccurate. The
    others are small and accurate, and it is minus their sum.
    """
    top = p.argmax(-1, keepdim=True).expand(*rows.shape[:-1], 1)
    others = rows.scatter(-1, top, 0.0)
    return others.scatter_(-1, top, -others.sum(-1, keepdim=True))
