"""The operators under test: how to build each, and its dense truth.

A new operator is one entry in `CASES`; every test in `test_contract.py` then applies to it.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import problems
import reference
import torch
from problems import Problem
from torch import Tensor

import curvlinops
from curvlinops import ParameterSpace, TorchLinearOperator


@dataclass(frozen=True)
class Case:
    """An operator, its own arguments, and what it equals.

    Attributes:
        dense: `problem -> matrix`, or None where it is random.
        square: Whether it maps parameters to parameters, symmetrically.
        takes_loss: Whether it depends on the loss.
        needs_root: Whether the loss's output Hessian must have a closed-form square root.
    """

    operator: type[TorchLinearOperator]
    dense: Callable[[Problem], Tensor] | None
    square: bool = True
    takes_loss: bool = True
    needs_root: bool = False
    arguments: tuple[tuple[str, Any], ...] = ()

    def build(self, p: Problem, **options: Any) -> TorchLinearOperator:
        """Build the operator for a problem."""
        options = dict(self.arguments) | options
        with warnings.catch_warnings():
            # the GGN of NLLLoss is zero, of which test_warnings.py tests the warning
            warnings.filterwarnings("ignore", ".*is linear in the model's output", UserWarning)
            if self.takes_loss:
                return p.build(self.operator, **options)
            options = {"batch_size_fn": p.batch_size_fn} | options
            return self.operator(p.model, p.params, p.data, **options)


CASES = {
    "hessian": Case(curvlinops.HessianLinearOperator, reference.hessian),
    "ggn": Case(curvlinops.GGNLinearOperator, reference.ggn),
    "fisher": Case(curvlinops.EFLinearOperator, reference.empirical_fisher),
    "fisher-samples": Case(
        curvlinops.EFLinearOperator,
        partial(reference.empirical_fisher, terms="sample"),
        arguments=(("terms", "sample"),),
    ),
    "mc": Case(
        curvlinops.FisherMCLinearOperator, None, needs_root=True, arguments=(("mc_samples", 3),)
    ),
    "ggn-mc": Case(
        curvlinops.GGNLinearOperator, None, needs_root=True, arguments=(("mc_samples", 2),)
    ),
    "ggn-diagonal": Case(
        curvlinops.GGNDiagonalLinearOperator,
        lambda p: reference.ggn(p).diagonal().diag(),
        needs_root=True,
    ),
    "gradients": Case(
        curvlinops.PerSampleGradientLinearOperator, reference.per_sample_gradients, square=False
    ),
    "jacobian": Case(
        curvlinops.JacobianLinearOperator, reference.jacobian, square=False, takes_loss=False
    ),
    "transposed": Case(
        curvlinops.TransposedJacobianLinearOperator,
        lambda p: reference.jacobian(p).T,
        square=False,
        takes_loss=False,
    ),
}
#: Kronecker-factored operators are a snapshot: they do not follow changes of the model, which most
#: tests of `CASES` ask for, and have blocks of their own. Their numbers are tested in test_kfac.py;
#: only what they share with all operators is tested together.
FACTORED = {
    "kfac": Case(
        curvlinops.KFACLinearOperator, None, needs_root=True, arguments=(("fallback", "dense"),)
    ),
    "ekfac": Case(
        curvlinops.EKFACLinearOperator, None, needs_root=True, arguments=(("fallback", "dense"),)
    ),
}
ALL = CASES | FACTORED
EXACT = [name for name, case in CASES.items() if case.dense is not None]
RANDOM = [name for name, case in CASES.items() if case.dense is None]


@cache
def dense(case: str, problem: str) -> Tensor:
    """Return the reference matrix, computed once per process."""
    return CASES[case].dense(problems.make(problem))


def matrix(operator: TorchLinearOperator) -> Tensor:
    """Form an operator, all columns at once."""
    return operator @ torch.eye(operator.shape[1], dtype=operator.torch_dtype)


def error(found: Tensor, expected: Tensor) -> float:
    """Return the relative error, absolute where zero is expected."""
    scale = float(expected.norm()) or 1.0
    return float((found.double() - expected.double()).norm()) / scale


def errors(p: Problem, found: Tensor, expected: Tensor, dim: int) -> dict[str, float]:
    """Return the relative error of each parameter's part of an axis.

    A part that is zero but for rounding errors of the others, such as that of a bias before a
    softmax, has none: its error is relative to the whole.
    """
    sizes = [value.numel() for value in p.named_params().values()]
    parts = zip(found.double().split(sizes, dim), expected.double().split(sizes, dim), strict=True)
    whole = expected.double().norm()
    norms = [(float((a - b).norm()), float(b.norm())) for a, b in parts]
    scaled = [e / ((norm if norm > 1e-12 * whole else float(whole)) or 1.0) for e, norm in norms]
    return dict(zip(p.named_params(), scaled, strict=True))


def vectors(operator: TorchLinearOperator, *shape: int, rows: bool = False) -> Tensor:
    """Return random vectors that the operator (or its adjoint) takes."""
    generator = torch.Generator().manual_seed(0)
    length = operator.shape[0] if rows else operator.shape[1]
    return torch.randn(length, *shape, generator=generator, dtype=operator.torch_dtype)


def places(space: ParameterSpace, selection: list) -> list[int]:
    """Return the coordinates of indices or names of tensors."""
    flat = range(space.dim)
    parts = [flat[space.slice(x)] if isinstance(x, str) else [x] for x in selection]
    return [place for part in parts for place in part]


#: One problem per kind of thing that could go wrong.
CORE = [
    "mlp-mse-mean",
    "mlp-ce-all-mean",
    "classes-ce-ignore-mean",
    "tokens-bce-all-mean",
    "mlp-user-mean",
    "cnn",
    "transformer-tied",
    "lstm-packed",
    "functional",
    "closure",
    "dict-batch-padding-idx",
    "float32-transformer",
]


MC = [name for name in problems.NAMES if problems.make(name).mc]


def is_defined(case: str, name: str) -> bool:
    """Return whether the operator is defined for the problem, and no other problem has the same."""
    if ALL[case].needs_root:
        return name in MC
    return ALL[case].takes_loss or name in problems.MODEL_NAMES or name in CORE


def pairs(cases: list[str], names: list[str]) -> list[tuple[str, str]]:
    """Return the cases and problems that belong together."""
    return [(case, name) for case in cases for name in names if is_defined(case, name)]
