"""Losses that are sums or means over the entries of the output."""

from abc import abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvlinops.autodiff.linear import Linear
from curvlinops.losses.base import Loss, constant, conversion_of
from curvlinops.losses.factored import FactoredHessian
from curvlinops.support.norms import wide

#: The smallest divisor of PyTorch's derivative of ``binary_cross_entropy``.
_SMALLEST = 1e-12


class ElementwiseLoss(Loss):
    """``l_t = k sum_c f(z_tc, y_tc)`` with k = 1/C for "mean", 1 for "sum".

    A term is one vector along the last axis; an output ``[N]`` has vectors of length one.
    Subclasses implement f and its derivatives, without k.
    """

    def check(self, output: Tensor, target: Any) -> None:
        """Require a target of the output's shape; PyTorch would broadcast."""
        if not isinstance(target, Tensor) or target.shape != output.shape:
            found = list(target.shape) if isinstance(target, Tensor) else type(target).__name__
            raise ValueError(
                f"{self.name} needs a target of the output's shape {list(output.shape)}, got "
                f"{found}. Broadcasting is not supported; reshape or expand the target."
                f"{conversion_of(target)}"
            )
        if target.is_complex():
            raise ValueError(f"{self.name} needs a real target, got {target.dtype}.")

    def sum(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the sum over all terms."""
        z, y = self._rows(output, target)
        return self._inner_scale(z) * self._value(z, y)

    def denominator(self, output: Tensor, target: Any) -> Tensor:
        """Return the number of terms."""
        num_features = max(_num_features(output), 1)
        return torch.tensor(output.numel() // num_features, device=output.device)

    def term_size(self, output: Tensor) -> int | None:
        """Return C under ``"mean"``, since PyTorch averages over it."""
        return _num_features(output) if self.reduction == "mean" else None

    def to_terms(self, columns: Tensor) -> Tensor:
        """Flatten all but the last axis of the output."""
        return wide(columns.unsqueeze(-1) if columns.ndim == 2 else columns.flatten(1, -2))

    def _target_rows(self, output: Tensor, target: Tensor) -> Any:
        return self.to_terms(target.unsqueeze(0).to(output.device, wide(output).dtype))[0]

    def _inner_scale(self, z: Tensor) -> float:
        return 1.0 / z.shape[-1] if self.reduction == "mean" else 1.0

    def _gradient(self, z: Tensor, y: Any) -> Tensor:
        return self._inner_scale(z) * self._first(z, y)

    def _hessian(self, z: Tensor, y: Any) -> Linear:
        diagonal = self._inner_scale(z) * self._second(z, y)
        return Linear(lambda v: diagonal * v, (diagonal,))

    def _factored_hessian(self, z: Tensor, y: Any) -> FactoredHessian:
        return FactoredHessian(self._root(z, y).expand_as(z), torch.zeros_like(z))

    @abstractmethod
    def _value(self, z: Tensor, y: Any) -> Tensor:
        """Return the sum of f over all entries, differentiable."""

    @abstractmethod
    def _first(self, z: Tensor, y: Any) -> Tensor:
        """Return the first derivatives of f, ``[T, C]``."""

    @abstractmethod
    def _second(self, z: Tensor, y: Any) -> Tensor:
        """Return the second derivatives of f, ``[T, C]``, or ``[1, C]`` if equal in all terms."""

    def _root(self, z: Tensor, y: Any) -> Tensor:
        """Return the square roots of the terms' Hessians, which are diagonal."""
        return self._sqrt(self._inner_scale(z) * self._second(z, y))


def _num_features(output: Tensor) -> int:
    return 1 if output.ndim == 1 else output.shape[-1]


class SquaredError(ElementwiseLoss):
    """``torch.nn.MSELoss``: ``f = (z - y)^2``."""

    can_sample = True

    def _value(self, z: Tensor, y: Tensor) -> Tensor:
        return (z - y).square().sum()

    def _first(self, z: Tensor, y: Tensor) -> Tensor:
        return 2.0 * (z - y)

    def _second(self, z: Tensor, y: Tensor) -> Tensor:
        return torch.full_like(z[:1], 2.0)

    def _root(self, z: Tensor, y: Tensor) -> Tensor:
        return torch.full_like(z[:1], (2.0 * self._inner_scale(z)) ** 0.5)

    def _sample(self, z: Tensor, y: Any, num_samples: int, generator: torch.Generator) -> Tensor:
        options = {"generator": generator, "dtype": z.dtype, "device": z.device}
        return self._root(z, y) * torch.randn(num_samples, *z.shape, **options)


class Huber(ElementwiseLoss):
    """``torch.nn.HuberLoss`` and ``torch.nn.SmoothL1Loss``: quadratic up to a distance w.

    With s = w for Huber and s = 1 for SmoothL1, ``f' = s / w (z - y)`` inside, ``±s`` outside.
    """

    def _value(self, z: Tensor, y: Tensor) -> Tensor:
        (width, slope, curvature), distance = self._options(), (z - y).abs()
        inside = distance.clamp(max=width)
        return (0.5 * curvature * inside.square() + slope * (distance - inside)).sum()

    def _first(self, z: Tensor, y: Tensor) -> Tensor:
        (width, slope, curvature), error = self._options(), z - y
        return torch.where(error.abs() < width, curvature * error, slope * error.sign())

    def _second(self, z: Tensor, y: Tensor) -> Tensor:
        width, _, curvature = self._options()
        return curvature * ((z - y).abs() < width).to(z.dtype)

    def _options(self) -> tuple[float, float, float]:
        """Return w, s, and the curvature inside."""
        if isinstance(self.module, nn.HuberLoss):
            return self.module.delta, self.module.delta, 1.0
        width = self.module.beta
        return width, 1.0, 1.0 / width if width else 0.0


class PoissonNLL(ElementwiseLoss):
    """``torch.nn.PoissonNLLLoss``: ``f = e^z - y z``, or ``z - y log(z + eps)`` of rates z."""

    can_sample = True

    def __init__(self, module: Any, reduction: str):
        super().__init__(module, reduction)
        # the Hessian with respect to rates depends on the labels
        self.can_sample = module.log_input

    def _value(self, z: Tensor, y: Tensor) -> Tensor:
        m = self.module
        options = {"log_input": m.log_input, "full": m.full, "eps": m.eps, "reduction": "sum"}
        return F.poisson_nll_loss(z, y, **options)

    def _first(self, z: Tensor, y: Tensor) -> Tensor:
        return z.exp() - y if self.module.log_input else 1 - y / (z + self.module.eps)

    def _second(self, z: Tensor, y: Tensor) -> Tensor:
        return z.exp() if self.module.log_input else y / (z + self.module.eps).square()

    def _sample(self, z: Tensor, y: Any, num_samples: int, generator: torch.Generator) -> Tensor:
        rates = z.exp().expand(num_samples, *z.shape)
        return self._inner_scale(z) ** 0.5 * (rates - torch.poisson(rates, generator=generator))


class _LabelWeights(ElementwiseLoss):
    """A cross-entropy of two labels, with weights p of the positive and n of the negative one.

    ``p = weight pos_weight y`` and ``n = weight (1 - y)``, for targets y from zero to one.
    """

    can_sample = True

    def check(self, output: Tensor, target: Tensor) -> None:
        """Require equal shapes, and weights that do not depend on the sample."""
        super().check(output, target)
        for option in ("weight", "pos_weight"):
            value = getattr(self.module, option, None)
            if value is not None and value.ndim >= output.ndim and value.shape[:1] != (1,):
                raise ValueError(
                    f"{self.name}'s {option} of shape {list(value.shape)} has a batch axis "
                    f"(the output is {list(output.shape)}), so it belongs to one batch only. Give "
                    "it the shape of one sample."
                )

    def _target_rows(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights p and n."""
        y = target.to(output.device, wide(output).dtype)
        options = (getattr(self.module, name, None) for name in ("weight", "pos_weight"))
        weight, pos_weight = (constant(x, y) for x in options)
        labels = y if pos_weight is None else pos_weight * y, 1 - y
        weighted = (x if weight is None else weight * x for x in labels)
        positive, negative = (self.to_terms(x.unsqueeze(0))[0] for x in weighted)
        return positive, negative


class BinaryCrossEntropy(_LabelWeights):
    """``torch.nn.BCEWithLogitsLoss``: ``f = p log(1 + e^-z) + n log(1 + e^z)``.

    The second derivative ``(p + n) sigmoid(z) sigmoid(-z)`` is accurate even if one of the sigmoids
    rounds to one.
    """

    def _value(self, z: Tensor, y: tuple[Tensor, Tensor]) -> Tensor:
        positive, negative = y
        return (negative * z - (positive + negative) * F.logsigmoid(z)).sum()

    def _first(self, z: Tensor, y: tuple[Tensor, Tensor]) -> Tensor:
        positive, negative = y
        return negative * z.sigmoid() - positive * (-z).sigmoid()

    def _second(self, z: Tensor, y: tuple[Tensor, Tensor]) -> Tensor:
        return (y[0] + y[1]) * z.sigmoid() * (-z).sigmoid()

    def _root(self, z: Tensor, y: tuple[Tensor, Tensor]) -> Tensor:
        variance = z.sigmoid() * (-z).sigmoid()
        return (self._inner_scale(z) * variance).sqrt() * self._sqrt(*y)

    def _sample(self, z: Tensor, y: Any, num_samples: int, generator: torch.Generator) -> Tensor:
        sigmoid = z.sigmoid().expand(num_samples, *z.shape)
        labels = torch.bernoulli(sigmoid, generator=generator)
        scale = self._inner_scale(z) ** 0.5 * self._sqrt(*y)
        return scale * torch.where(labels == 1, -(-z).sigmoid(), sigmoid)


class ProbabilityCrossEntropy(_LabelWeights):
    """``torch.nn.BCELoss``: ``f = -p log z - n log(1 - z)`` of probabilities z.

    The second derivative ``p / z^2 + n / (1 - z)^2`` depends on the target. Sampled labels have the
    Fisher information instead, its expectation over labels of the model: ``(p + n) / (z (1 - z))``.

    The first derivative is PyTorch's, which divides by at least 1e-12. Closer than that to 0 or 1
    there is no second derivative if the target has the other label: PyTorch's has no relation to
    the loss, whose logarithms end at -100.
    """

    def check(self, output: Tensor, target: Tensor) -> None:
        """Require probabilities, too; on a GPU, PyTorch's own check ends the process."""
        super().check(output, target)
        if not bool(((output >= 0) & (output <= 1)).all()):
            low, high = (float(x) for x in output.detach().aminmax())
            raise ValueError(
                f"{self.name} needs probabilities from 0 to 1, the model's output is from {low:g} "
                f"to {high:g}. For logits use BCEWithLogitsLoss."
            )

    def _value(self, z: Tensor, y: tuple[Tensor, Tensor]) -> Tensor:
        labels = (torch.ones_like(z), torch.zeros_like(z))
        pairs = zip(labels, y, strict=True)
        return sum(F.binary_cross_entropy(z, t, w, reduction="sum") for t, w in pairs)

    def _first(self, z: Tensor, y: tuple[Tensor, Tensor]) -> Tensor:
        positive, negative = y
        return ((positive + negative) * z - positive) / (z * (1 - z)).clamp(min=_SMALLEST)

    def _second(self, z: Tensor, y: tuple[Tensor, Tensor]) -> Tensor:
        return sum(self._curvature(p, w) for p, w in zip((z, 1 - z), y, strict=True))

    def _curvature(self, probability: Tensor, weight: Tensor) -> Tensor:
        """Return the second derivatives of a label's share of f."""
        counts = weight != 0
        if bool((counts & (probability < _SMALLEST)).any()):
            raise ValueError(
                f"{self.name} has no second derivative where the probability of a label in the "
                f"target is below {_SMALLEST:g}, or rounds to zero. Use BCEWithLogitsLoss, and let "
                "the model return logits, or bound the probabilities."
            )
        return torch.where(counts, weight / probability.square(), 0.0)

    def _sample(self, z: Tensor, y: Any, num_samples: int, generator: torch.Generator) -> Tensor:
        labels = torch.bernoulli(z.expand(num_samples, *z.shape), generator=generator)
        scale = self._inner_scale(z) ** 0.5 * self._sqrt(*y)
        return scale * torch.where(labels == 1, -1 / z, 1 / (1 - z))
