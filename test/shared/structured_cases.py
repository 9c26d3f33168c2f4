"""Structured operators with their matrices, and what can be done with each."""

import copy
import pickle
from functools import reduce

import torch
from torch import Tensor

from curvlinops import (
    BlockDiagonalLinearOperator,
    DiagonalLinearOperator,
    EighDecomposedLinearOperator,
    IdentityLinearOperator,
    KroneckerProductLinearOperator,
    ParameterSpace,
    StructuredLinearOperator,
    SumOfKroneckersLinearOperator,
    load,
)
from curvlinops.structured.layout import Layout, ParameterView

DOUBLE = torch.float64
CPU = torch.device("cpu")
Kron, Sum = KroneckerProductLinearOperator, SumOfKroneckersLinearOperator
Blocks, Diag = BlockDiagonalLinearOperator, DiagonalLinearOperator
Identity = IdentityLinearOperator


def randn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 7 * sum(shape))
    return torch.randn(shape, generator=generator, dtype=DOUBLE)


def definite(*shape: int, seed: int = 0) -> Tensor:
    """Return positive definite matrices ``[..., n, n]``, eigenvalues between 0.5 and 2."""
    vectors, _ = torch.linalg.qr(randn(*shape, shape[-1], seed=seed))
    values = torch.linspace(0.5, 2.0, shape[-1], dtype=DOUBLE)
    return vectors * values @ vectors.mT


def positive(n: int, seed: int = 0) -> Tensor:
    return randn(n, seed=seed).abs() + 0.3


def kron(*factors: Tensor) -> Tensor:
    """Return the matrix, block-diagonal over groups."""
    if factors[0].ndim == 2:
        return reduce(torch.kron, factors)
    return torch.block_diag(*[reduce(torch.kron, group) for group in zip(*factors, strict=True)])


def eye(n: int) -> Tensor:
    return torch.eye(n, dtype=DOUBLE)


A, B, C = definite(4), definite(3), definite(2)
A2, B2 = definite(4, seed=1), definite(3, seed=1)
GA, GB = definite(5, 3), definite(5, 2)
a, b = positive(4), positive(3)


def one_block(
    operator: StructuredLinearOperator, shapes: dict[str, tuple[int, ...]], layout: Layout
) -> StructuredLinearOperator:
    return Blocks([operator], ParameterSpace(shapes, operator.torch_dtype), [layout])


def weight_and_bias() -> tuple[StructuredLinearOperator, Tensor]:
    """A Kronecker product on a weight [3, 2, 2] with a bias [3], and its matrix."""
    joint = kron(B, definite(5))
    place = torch.arange(15).reshape(3, 5)
    order = torch.cat([place[:, :4].flatten(), place[:, 4]])
    views = ParameterView("weight", (12,), (1,)), ParameterView("bias", (3,), (1,))
    shapes = {"weight": (3, 2, 2), "bias": (3,)}
    operator = one_block(Kron(B, definite(5)), shapes, Layout(views, rows=3))
    return operator, joint[order][:, order]


def transposed_groups(name: str = "weight") -> tuple[StructuredLinearOperator, Tensor]:
    """Groups of a transposed convolution: [2 * 3, 4] is seen as [2, 4, 3]."""
    factors = (definite(2, 4), definite(2, 3))
    order = torch.arange(24).reshape(2, 4, 3).permute(0, 2, 1).flatten()
    layout = Layout((ParameterView(name, (2, 4, 3), (12, 1, 4)),))
    return one_block(Kron(*factors), {name: (6, 4)}, layout), kron(*factors)[order][:, order]


def embedding() -> tuple[StructuredLinearOperator, Tensor]:
    """A dense and a diagonal factor on a weight [4, 3]."""
    order = torch.arange(12).reshape(3, 4).T.flatten()
    layout = Layout((ParameterView("embedding", (3, 4), (1, 3)),))
    operator = one_block(Kron(B, Diag(a)), {"embedding": (4, 3)}, layout)
    return operator, kron(B, a.diag())[order][:, order]


def sliced() -> tuple[StructuredLinearOperator, Tensor]:
    """Blocks of a weight's even and odd rows, and of the two halves of its bias."""
    shapes = {"weight": (6, 4), "bias": (6,)}
    layouts = []
    for i in range(2):
        rows = ParameterView("weight", (3, 4), (8, 1), 4 * i)
        layouts.append(Layout((rows, ParameterView("bias", (3,), (1,), 3 * i)), rows=3))
    factors = [(B, definite(5)), (B2, definite(5, seed=1))]
    operator = Blocks([Kron(*pair) for pair in factors], ParameterSpace(shapes, DOUBLE), layouts)
    weight, bias = torch.arange(24).reshape(3, 2, 4), torch.arange(24, 30).reshape(2, 3)
    order = [torch.cat([weight[:, i], bias[i].unsqueeze(1)], 1).flatten() for i in range(2)]
    matrix = torch.zeros(30, 30, dtype=DOUBLE)
    for index, pair in zip(order, factors, strict=True):
        matrix[index.unsqueeze(1), index] = kron(*pair)
    return operator, matrix


def stacked(gap: int = 0) -> tuple[StructuredLinearOperator, Tensor]:
    """Equal blocks of three weights with biases, some entries apart, beside another block.

    Args:
        gap: The number of entries between the second and the third one.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(3):
        shapes |= {f"w{i}": (2, 1, 2), f"b{i}": (2,)} | ({"gap": (gap,)} if i == 1 else {})
    space = ParameterSpace(shapes, DOUBLE)
    views = tuple(ParameterView.whole(name, shapes[name]) for name in shapes if name != "gap")
    operators, layouts = [Kron(definite(3, 2), definite(3, 3))], [Layout(views, 2, 3)]
    if gap:
        operators.append(Diag(positive(gap)))
        layouts.append(Layout((ParameterView.whole("gap", (gap,)),)))
    matrix = torch.zeros(space.dim, space.dim, dtype=DOUBLE)
    place = space.split(torch.arange(space.dim))
    for i, factors in enumerate(zip(definite(3, 2), definite(3, 3), strict=True)):
        index = torch.cat([place[f"w{i}"].reshape(2, 2), place[f"b{i}"][:, None]], 1).flatten()
        matrix[index[:, None], index] = kron(*factors)
    if gap:
        matrix[place["gap"], place["gap"]] = positive(gap)
    return Blocks(operators, space, layouts), matrix


def network() -> tuple[StructuredLinearOperator, Tensor]:
    """Blocks of several kinds, whose parameters are in another order than the blocks."""
    conv = transposed_groups("conv.weight")
    parts = {"linear": weight_and_bias(), "conv": conv, "embedding": embedding()}
    norm = ParameterSpace({"norm": (2,)}, DOUBLE)
    parts["norm"] = (Diag(positive(2), norm), positive(2).diag())
    names = ["bias", "norm", "embedding", "weight", "conv.weight"]
    blocks = {name: operator for name, (operator, _) in parts.items()}
    dense = torch.block_diag(*[matrix for _, matrix in parts.values()])
    plain = Blocks(blocks).space
    space = ParameterSpace({name: plain.shapes[name] for name in names}, DOUBLE)
    place = torch.arange(plain.dim)
    order = torch.cat([place[plain.slice(name)] for name in names])
    return Blocks(blocks, space), dense[order][:, order]


def diagonal_axis(axis: int, groups: int) -> tuple[StructuredLinearOperator, Tensor]:
    """Sums of products with a diagonal factor, whose sum keeps one axis diagonal."""
    dense = [definite(groups, 3, seed=i) if groups else definite(3, seed=i) for i in range(2)]
    terms, total = [], torch.zeros(())
    for i, matrix in enumerate(dense):
        diagonal = positive(2, seed=i)
        terms.append(Kron(*[Diag(diagonal), matrix][:: 1 - 2 * axis]))
        pair = [diagonal.diag().expand(*matrix.shape[:-2], 2, 2), matrix]
        total = total + kron(*pair[:: 1 - 2 * axis])
    return Sum(terms), total


PLAIN = ParameterSpace.flat(3, DOUBLE, CPU)


ALL = {
    "matrix": lambda: (Kron(A), A),
    "two factors": lambda: (Kron(B, A), kron(B, A)),
    "three factors": lambda: (Kron(B, C, A), kron(B, C, A)),
    "factors of size one": lambda: (Kron(definite(1), B, definite(1)), 0.25 * B),
    "groups": lambda: (Kron(GB, GA), kron(GB, GA)),
    "depthwise": lambda: (Kron(definite(5, 1), GA), kron(definite(5, 1), GA)),
    "shared factor": lambda: (Kron(C, GA), kron(C.expand(5, 2, 2), GA)),
    "diagonal factor": lambda: (Kron(B, Diag(a)), kron(B, a.diag())),
    "diagonal factors": lambda: (Kron(Diag(b), Diag(a)), kron(b.diag(), a.diag())),
    "identity factor": lambda: (Kron(Identity(3), A), kron(eye(3), A)),
    "scaled identity factor": lambda: (Kron(3 * Identity(3), A), kron(3 * eye(3), A)),
    "nested": lambda: (Kron(Kron(B, C), A), kron(B, C, A)),
    "diagonal": lambda: (Diag(a), a.diag()),
    "identity": lambda: (Identity(PLAIN), eye(3)),
    "multiple of the identity": lambda: (0.3 * Identity(PLAIN), 0.3 * eye(3)),
    "decomposed": lambda: (EighDecomposedLinearOperator(*torch.linalg.eigh(A)), A),
    "corrected": lambda: (
        EighDecomposedLinearOperator(
            positive(12), Kron(*(torch.linalg.eigh(factor)[1] for factor in (B, A)))
        ),
        (Q := kron(*(torch.linalg.eigh(f)[1] for f in (B, A)))) * positive(12) @ Q.T,
    ),
    "blocks": lambda: (Blocks([Kron(B, A), Diag(b)]), torch.block_diag(kron(B, A), b.diag())),
    "weight and bias": weight_and_bias,
    "transposed groups": transposed_groups,
    "embedding": embedding,
    "sliced": sliced,
    "network": network,
    "stack": stacked,
    "stack, unevenly spaced": lambda: stacked(3),
    "sum": lambda: (Sum([Kron(B, A), Kron(B2, A2)]), kron(B, A) + kron(B2, A2)),
    "sum of diagonals": lambda: (
        Sum([Kron(Diag(b), Diag(a)), Kron(Diag(b), Diag(a + 1))]),
        kron(b.diag(), (2 * a + 1).diag()),
    ),
    "sum of single factors": lambda: (Sum([Kron(A), Kron(A2)]), A + A2),
    "sum with groups": lambda: (
        Sum([Kron(GB, GA), Kron(definite(5, 2, seed=1), GA)]),
        kron(GB, GA) + kron(definite(5, 2, seed=1), GA),
    ),
    "tied": lambda: (Sum([Kron(Diag(b), A), Kron(B, A2)]), kron(b.diag(), A) + kron(B, A2)),
    "first axis diagonal": lambda: diagonal_axis(0, 0),
    "second axis diagonal, groups": lambda: diagonal_axis(1, 5),
}


def damped(op: StructuredLinearOperator, number: float) -> StructuredLinearOperator:
    return op + number * Identity(op.space)


CHANGES = {
    "itself": lambda op, M: (op, M),
    "damped": lambda op, M: (damped(op, 0.3), M + 0.3 * eye(len(M))),
    "damped twice": lambda op, M: (
        0.1 * Identity(op.space) + damped(op, 0.1),
        M + 0.2 * eye(len(M)),
    ),
    "scaled": lambda op, M: (2.5 * op, 2.5 * M),
    "divided": lambda op, M: (op / 2, M / 2),
    "scaled after damping": lambda op, M: (2 * damped(op, 0.3), 2 * M + 0.6 * eye(len(M))),
    "inverse": lambda op, M: (op.inverse(), M.inverse()),
    "damped inverse": lambda op, M: (op.inverse(0.2), (M + 0.2 * eye(len(M))).inverse()),
    "square": lambda op, M: (op**2, M @ M),
    "power zero": lambda op, M: (op**0, eye(len(M))),
    "eigendecomposition": lambda op, M: (op.eigh(), M),
    "decomposition, damped": lambda op, M: (damped(op.eigh(), 0.1), M + 0.1 * eye(len(M))),
    "float32": lambda op, M: (op._to(CPU, torch.float32), M),
    "pickled": lambda op, M: (pickle.loads(pickle.dumps(op)), M),
    "copied": lambda op, M: (copy.deepcopy(op), M),
    "saved": lambda op, M: (load(op.state_dict()), M),
}


def root(M: Tensor, exponent: float) -> Tensor:
    values, vectors = torch.linalg.eigh(M)
    return vectors * values**exponent @ vectors.T


def slopes(op: StructuredLinearOperator) -> Tensor:
    """Return two derivatives of the log-determinant in a damping."""
    number = torch.full((), 0.1, dtype=op.torch_dtype, requires_grad=True)
    first = torch.autograd.grad(op.damped(number).logdet(), number, create_graph=True)[0]
    return torch.stack([first.detach(), *torch.autograd.grad(first, number)])


#: What is asked of an operator, and of its matrix.
QUANTITIES = {
    "product": (lambda op: op @ eye(op.shape[0]), lambda M: M),
    "one column": (lambda op: op @ randn(op.shape[0]), lambda M: M @ randn(len(M))),
    "adjoint product": (lambda op: randn(2, op.shape[0]) @ op, lambda M: randn(2, len(M)) @ M),
    "dense": (lambda op: op.to_dense(), lambda M: M),
    "trace": (lambda op: op.trace(), lambda M: M.trace()),
    "det": (lambda op: op.det(), torch.det),
    "logdet": (lambda op: op.logdet(), torch.logdet),
    "norm": (lambda op: op.frobenius_norm(), lambda M: M.norm()),
    "diagonal": (lambda op: op.diagonal(), lambda M: M.diag()),
    "eigenvalues": (lambda op: op.eigvalsh(), torch.linalg.eigvalsh),
    "solution": (lambda op: op.solve(eye(op.shape[0])[:, :2]), lambda M: M.inverse()[:, :2]),
    "eigh": (lambda op: op.eigh().to_dense(), lambda M: M),
    "diagonal of eigh": (lambda op: op.eigh().diagonal(), lambda M: M.diag()),
    "inverse": (lambda op: op.inverse().to_dense(), lambda M: M.inverse()),
    "damped": (lambda op: op.damped(0.1).to_dense(), lambda M: M + 0.1 * eye(len(M))),
    "slopes": (
        slopes,
        lambda M: torch.stack(
            [
                (M + 0.1 * eye(len(M))).inverse().trace(),
                -((M + 0.1 * eye(len(M))).inverse() ** 2).sum(),
            ]
        ),
    ),
    "damped inverse": (
        lambda op: op.inverse(0.1).to_dense(),
        lambda M: (M + 0.1 * eye(len(M))).inverse(),
    ),
    "power -1": (lambda op: (op**-1).to_dense(), lambda M: M.inverse()),
    "power 0.5": (lambda op: (op**0.5).to_dense(), lambda M: root(M, 0.5)),
    "power -0.3": (lambda op: op.power(-0.3).to_dense(), lambda M: root(M, -0.3)),
    "power 3": (lambda op: (op**3).to_dense(), lambda M: M @ M @ M),
}
