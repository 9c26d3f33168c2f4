"""Inside of compiled functions, everything runs uncompiled, with the same numbers."""

from collections.abc import Callable

import pytest
import torch
from tables import core
from torch import Tensor, nn

import curvlinops as C

torch.manual_seed(0)
DOUBLE = torch.float64
MODEL = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
BATCH = torch.randn(6, 3, dtype=DOUBLE), torch.randint(2, (6,))
PARAMS = list(MODEL.parameters())
DIM = sum(p.numel() for p in PARAMS)
V = torch.randn(DIM, dtype=DOUBLE)
M = torch.diag(torch.arange(1.0, 6.0)) + 0.1

DATA = MODEL, nn.CrossEntropyLoss(), PARAMS, [BATCH]
H, G = C.HessianLinearOperator(*DATA), C.GGNLinearOperator(*DATA)
JACOBIAN = MODEL, PARAMS, [BATCH]
J = C.JacobianLinearOperator(*JACOBIAN)
K = C.KFACLinearOperator(*DATA, fisher_type="type-2")
DAMPED = G.damped(1.0)


def updated() -> Tensor:
    operator = C.KFACLinearOperator(*DATA, fisher_type="type-2")
    operator.update(BATCH, decay=0.5)
    return operator.trace()


def linearized() -> Tensor:
    A = H + 2 * G
    with A.linearized():
        return A @ (A @ V)


#: A few of each kind; the others are below.
CORE: dict[str, Callable[[], Tensor]] = {
    "Hessian": lambda: C.HessianLinearOperator(*DATA) @ V,
    "update": updated,
    "linearized": linearized,
    "CG": lambda: C.CGInverseLinearOperator(DAMPED, preconditioner=K.inverse(1.0)).solve(V).x,
}

#: Others; `contract/test_modes.py` has methods and algorithms.
CASES: dict[str, Callable[[], Tensor]] = {
    # constructors
    "KFAC": lambda: C.KFACLinearOperator(*DATA, fisher_type="type-2") @ V,
    "GGN": lambda: C.GGNLinearOperator(*DATA, mc_samples=2) @ V,
    "Fisher": lambda: C.FisherMCLinearOperator(*DATA) @ V,
    "empirical Fisher": lambda: C.EFLinearOperator(*DATA) @ V,
    "per-sample gradients": lambda: C.PerSampleGradientLinearOperator(*DATA) @ V,
    "transposed Jacobian": lambda: C.TransposedJacobianLinearOperator(*JACOBIAN).T @ V,
    "EKFAC": lambda: C.EKFACLinearOperator(*DATA, fisher_type="type-2") @ V,
    "KFAC inverse, made by its class": lambda: C.KFACInverseLinearOperator(K, 1e-2) @ V,
    "Kronecker product": lambda: C.KroneckerProductLinearOperator(M, M).inverse(0.1).diagonal(),
    "block-diagonal": lambda: C.BlockDiagonalLinearOperator(
        [C.DiagonalLinearOperator(M[0]), C.KroneckerProductLinearOperator(M)]
    ).trace(),
    "identity": lambda: C.IdentityLinearOperator(4) @ torch.ones(4),
    "eigendecomposed": lambda: C.EighDecomposedLinearOperator(*torch.linalg.eigh(M)).logdet(),
    # products and algebra
    "matvec": lambda: torch.as_tensor(H.matvec(V.numpy())),
    "columns": lambda: H @ torch.stack([V, 2 * V], dim=1),
    "list": lambda: (H @ [p.detach() for p in PARAMS])[0],
    "from the left": lambda: V @ J.T,
    "algebra": lambda: ((H - 2 * G) ** 2 / 3) @ V,
    "NTK": lambda: (J @ J.T).to_dense(),
    "repr": lambda: torch.tensor(len(repr(H))),
    # methods
    "norm": lambda: K.frobenius_norm(),
    "eigenvalues": lambda: K.eigvalsh(),
    "blocks": lambda: next(iter(K.blocks.values())).trace(),
    "report": lambda: torch.tensor(len(K.report())),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # PyTorch's, at any graph break
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")  # nor in the test itself
@pytest.mark.parametrize("name", core(CORE, CASES))
def test_same_numbers_inside_of_compiled_functions(name: str):
    compute = (CORE | CASES)[name]
    torch._dynamo.reset()
    found = torch.compile(lambda: 2 * compute(), backend="eager")()
    torch.testing.assert_close(found, 2 * compute(), rtol=1e-9, atol=1e-12)


def test_users_operators_are_constructed_uncompiled():
    compiled = []

    class Own(C.TorchLinearOperator):
        def __init__(self, scale: float):
            compiled.append(torch.compiler.is_compiling())
            self.scale = scale
            super().__init__(C.ParameterSpace({"": (3,)}), self_adjoint=True)

        def _apply(self, columns: Tensor) -> Tensor:
            compiled.append(torch.compiler.is_compiling())
            return self.scale * columns

    torch._dynamo.reset()
    found = torch.compile(lambda x: Own(2.0) @ (x + 1), backend="eager")(torch.ones(3))
    assert torch.equal(found, torch.full((3,), 4.0)) and compiled == [False, False]
