"""Dense float64 references for KFAC and EKFAC: plain autograd, one sample at a time.

Imports nothing from the package. Layers that are modules are found by hooks on a copy of the
model; models without such modules are written down once more (`models`), which records. All
parameters that no layer was recorded for have the exact block: that is what norms, scales and
shifts have in the package.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import reference
import torch
from problems import Problem
from recording import Use, of_lookup, of_rows, record, recording
from torch import Tensor, nn

Vectors = Callable[[Problem, int, Tensor, Any], Tensor]


def _conv(module: nn.Module, x: Tensor, out: Tensor) -> Use:
    """Patches are the responses to one-hot filters."""
    weight, G = module.weight, module.groups
    outs, ins = weight.shape[0] // G, weight[0].numel()
    filters = (
        torch.eye(ins, dtype=x.dtype).reshape(ins, *weight.shape[1:]).repeat(G, *[1] * (x.ndim - 1))
    )
    patches = module._conv_forward(x.detach(), filters, None)  # [1, G * ins, *]
    return Use(
        weight,
        torch.arange(weight.numel()).reshape(G, outs, ins),
        patches.reshape(G, ins, -1).permute(2, 0, 1),
        out,
        lambda g: g.reshape(G, outs, -1).permute(2, 0, 1),
        module.bias,
        torch.arange(G * outs),
        lambda g: g.reshape(G * outs, -1).T,
    )


def _conv_transposed(module: nn.Module, x: Tensor, out: Tensor) -> Use:
    """Positions are those of the input; each writes a patch of the output."""
    weight, G = module.weight, module.groups  # [in, out / G, *kernel]
    ins, per_group = weight.shape[0] // G, weight[0].numel()
    C = weight.shape[1] * G
    entries = torch.arange(weight.numel()).reshape(G, ins, per_group).mT

    def rows(g: Tensor) -> Tensor:
        """The adjoint of writing patches, by differentiation: input `[G * patch]` at positions."""
        spread = torch.zeros(1, G * per_group, *x.shape[2:], dtype=g.dtype, requires_grad=True)
        eye = torch.eye(per_group, dtype=g.dtype).reshape(per_group, *weight.shape[1:])
        copy = type(module)(
            G * per_group, C, module.kernel_size, module.stride, module.padding,
            module.output_padding, G, False, module.dilation, dtype=g.dtype,
        )  # fmt: skip
        copy.weight = nn.Parameter(eye.repeat(G, *[1] * (eye.ndim - 1)))
        (found,) = torch.autograd.grad(copy(spread), spread, g)
        return found.reshape(G, per_group, -1).permute(2, 0, 1)

    return Use(
        weight,
        entries,
        x.detach().reshape(G, ins, -1).permute(2, 0, 1),
        out,
        rows,
        module.bias,
        torch.arange(C),
        lambda g: g.reshape(C, -1).T,
        joint=False,
    )


def _bilinear(module: nn.Bilinear, x: Tensor, other: Tensor, out: Tensor) -> Use:
    a = (x.unsqueeze(-1) * other.unsqueeze(-2)).flatten(-2)
    return of_rows(module.weight, module.bias, a, out)


_LAYERS: dict[type, Callable[..., Use]] = {
    nn.Linear: lambda layer, *args: of_rows(layer.weight, layer.bias, *args),
    nn.Bilinear: _bilinear,
    nn.Embedding: lambda layer, *args: of_lookup(layer.weight, layer.padding_idx, *args),
    **dict.fromkeys([nn.Conv1d, nn.Conv2d, nn.Conv3d], _conv),
    **dict.fromkeys([nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d], _conv_transposed),
}


def _watch(p: Problem, model: Any) -> None:
    """Let a copy of a model record; in-place functions must not overwrite what was recorded."""

    def hook(module: nn.Module, args: tuple, out: Tensor) -> Tensor | None:
        if not out.requires_grad:
            return None
        if type(module).__name__ == "Conv1D":  # of transformers: `[in, out]`
            record(lambda: of_rows(module.weight, module.bias, *args, out, transposed=True))
        else:
            record(lambda: _LAYERS[type(module)](module, *args, out))
        return out + 0

    if isinstance(model, nn.Module) and "inner-grad" not in p.tags:
        for module in model.modules():
            if type(module) in _LAYERS or type(module).__name__ == "Conv1D":
                module.register_forward_hook(hook)


# --- what is backpropagated -----------------------------------------------------------------------


def type_2(p: Problem, number: int, output: Tensor, y: Any) -> Tensor:
    """Square root of the loss's Hessian, term by term: `[V, *output]`."""
    z = output.detach().requires_grad_()
    columns = [z.new_zeros(0, *z.shape)]
    for term in reference._terms(p, z, y)[0]:
        gradient = reference._grad(term, [z], create_graph=True)
        values, vectors = torch.linalg.eigh(reference._rows(gradient, [z]))
        columns.append((vectors * values.clamp(min=0).sqrt()).T.reshape(-1, *z.shape))
    return torch.cat(columns)


def empirical(p: Problem, number: int, output: Tensor, y: Any) -> Tensor:
    """The gradient of the sample's loss, all its terms together."""
    z = output.detach().requires_grad_()
    return reference._grad(sum(reference._terms(p, z, y)[0], 0 * z.sum()), [z]).reshape(1, *z.shape)


VECTORS: dict[str, Vectors] = {"type-2": type_2, "empirical": empirical}


# --- KFAC -----------------------------------------------------------------------------------------


@dataclass
class Factors:
    """Sums over the data of one Kronecker product, and what is added at once per sample."""

    entries: Tensor  # in the flat vector of all parameters, [G, O, I]
    lookup: bool
    A: Tensor | float = 0.0
    B: Tensor | float = 0.0
    count: float = 0.0
    samples: list[Tensor] = field(default_factory=list)  # gradients [V, G, O, I]
    rows: list[Tensor] = field(default_factory=list)  # of what a fit is made, [P, G, O, I]

    def matrix(self, c: float, forward_only: bool) -> tuple[Tensor, Tensor]:
        """B and A, `[G, O, O]` and `[G, I, I]`."""
        G, outs, _ = self.entries.shape
        B = torch.eye(outs, dtype=self.A.dtype).repeat(G, 1, 1) if forward_only else c * self.B
        return B, self.A / max(self.count, 1)


@dataclass(frozen=True)
class Options:
    """How the reference is computed."""

    reduce: bool = False
    joint: bool = False
    corrected: bool = False
    forward_only: bool = False
    fit: str = "kfac"
    steps: int = 1


class _Sums:
    def __init__(self, leaves: list[Tensor], options: Options):
        self.options = options
        self.leaves = leaves
        sizes = [leaf.numel() for leaf in leaves]
        self.offsets = {id(x): sum(sizes[:i]) for i, x in enumerate(leaves)}
        self.dim = sum(sizes)
        self.products: dict[Any, Factors] = {}
        self.exact: dict[int, Tensor] = {}
        self.covered: set[int] = set()

    def add(self, uses: list[Use], gradients: list[Tensor], whole: list[Tensor]) -> None:
        """Add a sample: gradients `[V, *output]` of each use, and `[V, *shape]` of each leaf."""
        parts: dict[Any, list[tuple[Tensor, Tensor]]] = {}
        pairs = {(id(use.weight), id(use.bias)) for use in uses}
        for use, g in zip(uses, gradients, strict=True):
            own = {pair for pair in pairs if pair[0] == id(use.weight) or pair[1] == id(use.bias)}
            for key, entries, a, rows in self._split(use, g, use.joint and len(own) == 1):
                self.products.setdefault(key, Factors(entries, key[-1]))
                parts.setdefault(key, []).append((a, rows))
        for key, pairs in parts.items():
            self._add(self.products[key], pairs)
        covered = {id(x) for use in uses for x in (use.weight, use.bias)} | self.covered
        self.covered = covered
        for leaf, g in zip(self.leaves, whole, strict=True):
            if id(leaf) not in covered and g.numel():
                flat = g.reshape(len(g), -1)
                key = self.offsets[id(leaf)]
                self.exact[key] = self.exact.get(key, 0) + flat.T @ flat

    def _split(self, use: Use, g: Tensor, alone: bool) -> Iterator[tuple]:
        weight, bias = self.offsets.get(id(use.weight)), self.offsets.get(id(use.bias))
        joint = self.options.joint and alone and None not in (weight, bias)
        if weight is not None:
            entries, a = weight + use.entries, use.a
            if joint:
                G, outs, _ = entries.shape
                last = (bias + use.bias_entries).reshape(G, outs, 1)
                entries = torch.cat([entries, last], 2)
                a = torch.cat([a, torch.ones_like(a[..., :1])], 2)
            rows = (
                torch.stack([use.rows(v) for v in g])
                if len(g)
                else g.new_zeros(0, len(a), *entries.shape[:2])
            )
            yield (
                (weight, *entries[0, 0, :2].tolist(), int(entries[0, 0, 0]), use.lookup),
                entries,
                a,
                rows,
            )
        if bias is not None and not joint:
            entries = (bias + use.bias_entries).reshape(1, -1, 1)
            rows = [use.bias_rows(v).unsqueeze(1) for v in g]
            n = len(use.bias_rows(torch.zeros_like(use.output)))
            rows = torch.stack(rows) if rows else g.new_zeros(0, n, 1, entries.shape[1])
            ones = torch.ones(n, 1, 1, dtype=g.dtype)
            yield (bias, int(entries[0, 0, 0]), False), entries, ones, rows

    def _add(self, sums: Factors, pairs: list[tuple[Tensor, Tensor]]) -> None:
        a = torch.cat([a for a, _ in pairs])  # [S, G, I]
        g = torch.cat([g for _, g in pairs], 1)  # [V, S, G, O]
        sums.samples.append(torch.einsum("vsgo,sgi->vgoi", g, a))
        positions = torch.einsum("vsgo,sgi->vsgoi", g, a).flatten(0, 1)
        sums.rows.append(sums.samples[-1] if self.options.reduce else positions)
        if len(a) == 0:
            sums.A = sums.A + a.new_zeros(a.shape[1], a.shape[2], a.shape[2])
            sums.B = sums.B + g.new_zeros(g.shape[2], g.shape[3], g.shape[3])
            return
        if self.options.reduce:
            a, g = a.mean(0, keepdim=True), g.sum(1, keepdim=True)
        A = torch.einsum("sgi,sgj->gij", a, a)
        sums.A = sums.A + (torch.diag_embed(A.diagonal(dim1=1, dim2=2)) if sums.lookup else A)
        sums.B = sums.B + torch.einsum("vsgo,vsgp->gop", g, g)
        sums.count += len(a)

    def dense(self, c: float) -> Tensor:
        """The approximation as a matrix."""
        out = torch.zeros(self.dim, self.dim, dtype=torch.float64)
        for start, block in self.exact.items():
            out[start : start + len(block), start : start + len(block)] = c * block
        places = [{*sums.entries.flatten().tolist()} for sums in self.products.values()]
        for number, sums in enumerate(self.products.values()):
            B, A = sums.matrix(c, self.options.forward_only)
            is_sum = any(places[number] & x for other, x in enumerate(places) if other != number)
            if self.options.fit != "kfac" and not is_sum:
                B, A = _fitted(sums, c, B, A, self.options)
            for entries, b, a, *rest in zip(
                sums.entries, B, A, *([torch.cat(sums.samples).unbind(1)] if sums.samples else []),
                strict=True,
            ):  # fmt: skip
                index = entries.flatten()
                block = torch.kron(b, a)
                if self.options.corrected:
                    Qb, Qa = torch.linalg.eigh(b)[1], torch.linalg.eigh(a)[1]
                    moment = torch.einsum("oj,voi,ik->vjk", Qb, rest[0], Qa).square().sum(0)
                    Q = torch.kron(Qb, Qa)
                    block = (Q * (c * moment).flatten()) @ Q.T
                out[index[:, None], index] += block
        return out


def _fitted(
    sums: Factors, c: float, B: Tensor, A: Tensor, options: Options
) -> tuple[Tensor, Tensor]:
    """Other factors than those of KFAC, for each group."""
    pairs = [_fit(G, c, b, a, options, sums.lookup) for G, b, a in zip(
        torch.cat(sums.rows).unbind(1), B, A, strict=True)]  # fmt: skip
    return torch.stack([b for b, _ in pairs]), torch.stack([a for _, a in pairs])


def _fit(
    G: Tensor, c: float, B: Tensor, A: Tensor, options: Options, diagonal: bool
) -> tuple[Tensor, Tensor]:
    """Factors for gradients `[P, O, I]`; B and A have their shapes."""

    def both(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        b = c * sum((g @ left @ g.T for g in G), torch.zeros_like(B))
        a = c * sum((g.T @ right @ g for g in G), torch.zeros_like(A))
        return b, torch.diag(a.diagonal()) if diagonal else a

    def weighting(x: Tensor) -> Tensor:
        if options.fit == "frobenius":
            return x / max(x.square().sum(), 1e-300)
        inverse = torch.linalg.pinv(x, rtol=1e-11, hermitian=True)
        return inverse / max(round(float((inverse @ x).trace())), 1)

    if options.fit == "shampoo":
        B, A = both(torch.eye(len(A), dtype=A.dtype), torch.eye(len(B), dtype=B.dtype))
        return B, A / max(A.trace(), 1e-300)
    left = torch.eye(len(A), dtype=A.dtype)
    for _ in range(options.steps):
        B = both(left, B)[0]
        A = both(left, weighting(B))[1]
        left = weighting(A)
    return B, A


def sums(p: Problem, vectors: Vectors, options: Options) -> _Sums:
    """Pass over the data."""
    with reference.evaluation(p) as (leaves, forward):
        _watch(p, forward)
        total = _Sums(leaves, options)
        for number, (x, y) in enumerate(reference.samples(p)):
            with recording() as uses:
                output = forward(x)
            U = [] if options.forward_only else vectors(p, number, output, y)
            outputs = [use.output for use in uses]
            found = [
                torch.autograd.grad(
                    output, [*outputs, *leaves], v, retain_graph=True, allow_unused=True,
                    materialize_grads=True,
                )
                for v in U
            ]  # fmt: skip
            columns = [
                torch.stack([g[i] for g in found]) if found else x.new_zeros(0, *x.shape)
                for i, x in enumerate([*outputs, *leaves])
            ]
            columns = [g.detach() for g in columns]
            total.add(uses, columns[: len(uses)], columns[len(uses) :])
        return total


def kfac(p: Problem, fisher: str | Vectors = "type-2", **options: Any) -> Tensor:
    """KFAC, or with `corrected=True` EKFAC, as a matrix `[D, D]`.

    Args:
        p: The problem.
        fisher: "type-2" (all terms on their own), "empirical", "forward-only"; or a function from
            the number of a sample, its output and target to vectors `[V, *output]`.
        **options: See `Options`.
    """
    if fisher == "forward-only":
        return sums(p, type_2, Options(forward_only=True, **options)).dense(1.0)
    vectors = VECTORS[fisher] if isinstance(fisher, str) else fisher
    return sums(p, vectors, Options(**options)).dense(reference.normalization(p))
