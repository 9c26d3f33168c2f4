"""The choices that define a Kronecker-factored approximation."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from curvlinops.losses import Loss
from curvlinops.support.arguments import check_choice, nearest


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


class Fallback(StrEnum):
    """The block of parameters whose use in the model has no Kronecker structure."""

    ERROR = "error"
    DIAGONAL = "diagonal"
    DENSE = "dense"


@dataclass(frozen=True)
class Options:
    """The options of an approximation, checked; see ``KroneckerFactoredLinearOperator``.

    Attributes:
        fisher_type: The backpropagated vectors.
        mc_samples: The number of samples, or of draws of signs.
        seed: The seed of the samples.
        exact: Whether each term is backpropagated on its own (type-2).
        reduced: The parameters that are treated by the reduce setting.
        joint: Whether weight and bias have one block.
        fallback: The block of parameters without Kronecker structure.
        max_factor_size: Above this size, matrices are replaced by their diagonals.
    """

    fisher_type: FisherType
    mc_samples: int
    seed: int
    exact: bool
    reduced: frozenset[str]
    joint: bool
    fallback: Fallback
    max_factor_size: int

    def check(self, loss: Loss) -> None:
        """Check that the options go together.

        Raises:
            ValueError: If one has no meaning beside the others.
            NotImplementedError: If the loss has no likelihood to sample from.
        """
        fisher = self.fisher_type
        if fisher is FisherType.MC:
            loss.check_can_sample()
        if self.mc_samples != 1 and fisher not in (FisherType.MC, FisherType.TYPE2):
            raise ValueError(
                f"mc_samples has no meaning for fisher_type='{fisher}': leave it at 1, got "
                f"{self.mc_samples}."
            )
        if self.exact and fisher is not FisherType.TYPE2:
            raise ValueError(f"exact=True is a variant of fisher_type='type-2', not of '{fisher}'.")


def reduced_parameters(kfac_approx: object, names: list[str]) -> frozenset[str]:
    """Return the parameters for which the reduce setting is wanted.

    Args:
        kfac_approx: A ``KFACType``, or a mapping to these from names of parameters, or of the
            modules that contain them; the others are treated by the expand setting.
        names: The names of all parameters.

    Raises:
        ValueError: If there is no such setting, or no parameter of that name.
    """
    if not isinstance(kfac_approx, Mapping):
        reduce = check_choice("kfac_approx", kfac_approx, KFACType) is KFACType.REDUCE
        return frozenset(names if reduce else ())
    chosen: dict[str, KFACType] = {}
    for key in sorted(kfac_approx, key=len):  # a submodule's setting overrides its parent's
        value = check_choice(f"kfac_approx[{key!r}]", kfac_approx[key], KFACType)
        matching = [
            name for name in names if name == key or name.startswith(f"{key}.") or key == ""
        ]
        if not matching:
            raise ValueError(f"kfac_approx has an unknown name '{key}'. {nearest(key, names)}")
        chosen |= dict.fromkeys(matching, value)
    return frozenset(name for name, value in chosen.items() if value is KFACType.REDUCE)
