"""The choices that define a Kronecker-factored approximation."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from curvlinops.linear_operator.space import by_name
from curvlinops.losses import Loss
from curvlinops.support.arguments import check_choice
from curvlinops.support.files import recorded


@recorded
class FisherType(StrEnum):
    """The vectors that are backpropagated to compute the gradient factors."""

    #: The columns of the square root of each term's loss Hessian.
    TYPE2 = "type-2"
    #: Sampled would-be gradients, whose outer products have the loss Hessian as expectation.
    MC = "mc"
    #: The gradients of the loss, for all terms of a sample together.
    EMPIRICAL = "empirical"
    #: No vectors. The gradient factors are replaced by the identity.
    FORWARD_ONLY = "forward-only"


class KFACType(StrEnum):
    """The treatment of positions that share a weight: tokens, pixels (Eschenhagen et al., 2023)."""

    #: Positions are treated like samples.
    EXPAND = "expand"
    #: Inputs are averaged and gradients are added up over the positions of a sample.
    REDUCE = "reduce"


@recorded
class FitType(StrEnum):
    """How the factors of ``B (x) A`` are fitted to the block ``F = c * sum vec(G) vec(G)^T``.

    Here G is a gradient of a layer's weight, ``[out, in]``: of a single position in the expand
    setting, of a sample in the reduce setting.
    """

    #: Second moments of inputs and of output gradients, as if these were independent.
    KFAC = "kfac"
    #: ``|F - B (x) A|`` in the Frobenius norm: ``B = c * sum G A G^T / |A|^2``, and A likewise, in
    #: turn (Van Loan and Pitsianis, 1993; Koroko et al., Efficient approximations of the Fisher
    #: matrix in neural networks using Kronecker product singular value decomposition, 2022).
    FROBENIUS = "frobenius"
    #: The Kullback-Leibler divergence from ``N(0, F)`` to ``N(0, B (x) A)``:
    #: ``B = c * sum G A^-1 G^T / in``, and A likewise, in turn (Dutilleul, 1999; Lin et al.,
    #: Understanding and improving Shampoo and SOAP via Kullback-Leibler minimization, 2025).
    #: Where A has zero eigenvalues, on its range.
    KL = "kl"
    #: ``B = c * sum G G^T`` and ``A = c * sum G^T G / tr F``: one step of the Frobenius fit from
    #: the identity, with the trace of F (Gupta et al., Shampoo, 2018; Morwani et al., A new
    #: perspective on Shampoo's preconditioner, 2025). In the expand setting, it is TKFAC (Gao et
    #: al., A trace-restricted Kronecker-factored approximation to natural gradient, 2021).
    SHAMPOO = "shampoo"


@recorded
class Fallback(StrEnum):
    """The block of parameters whose use in the model has no Kronecker structure."""

    ERROR = "error"
    DIAGONAL = "diagonal"
    DENSE = "dense"


@recorded
@dataclass(frozen=True)
class Options:
    """The options of an approximation, checked; see ``KroneckerFactoredLinearOperator``."""

    fisher_type: FisherType
    mc_samples: int
    seed: int
    exact: bool
    #: The parameters that are treated by the reduce setting.
    reduced: frozenset[str]
    #: Whether weight and bias have one block.
    joint: bool
    fallback: Fallback
    max_factor_size: int
    fit: FitType = FitType.KFAC
    steps: int = 1

    def check(self, loss: Loss) -> None:
        """Refuse options that do not go together, or with the loss."""
        fisher = self.fisher_type
        if fisher is FisherType.MC:
            loss.check_can_sample()
        if self.mc_samples != 1 and fisher not in (FisherType.MC, FisherType.TYPE2):
            raise ValueError(
                f"mc_samples has no meaning for fisher_type='{fisher}': leave it at 1, got "
                f"{self.mc_samples}."
            )
        if self.fit is not FitType.KFAC and fisher is FisherType.FORWARD_ONLY:
            raise ValueError(
                f"fit='{self.fit}' needs gradients; fisher_type='forward-only' has fit='kfac' only."
            )
        if self.steps != 1 and self.fit in (FitType.KFAC, FitType.SHAMPOO):
            raise ValueError(
                f"steps has no meaning for fit='{self.fit}': leave it at 1, got {self.steps}."
            )
        if self.exact and fisher is not FisherType.TYPE2:
            raise ValueError(f"exact=True is a variant of fisher_type='type-2', not of '{fisher}'.")


def reduced_parameters(kfac_approx: object, names: list[str]) -> frozenset[str]:
    """Return the parameters for which the reduce setting is wanted; submodules override parents."""
    if not isinstance(kfac_approx, Mapping):
        reduce = check_choice("kfac_approx", kfac_approx, KFACType) is KFACType.REDUCE
        return frozenset(names if reduce else ())
    values = {k: check_choice(f"kfac_approx[{k!r}]", x, KFACType) for k, x in kfac_approx.items()}
    chosen = by_name(values, names, "kfac_approx")
    return frozenset(name for name, value in chosen.items() if value is KFACType.REDUCE)
