"""Dense float64 references for every operator: plain autograd, one sample at a time.

Imports nothing from the package. Terms are written out by hand, as scalars; their derivatives come
from autograd, so a closed form in the package is compared with something that is not a closed form.
`p` is a `problems.Problem` throughout. Vectors are the parameters in the given order, each
flattened row-major. Every evaluation is on a float64 copy; the user's model is left untouched.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from problems import Problem
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map

# --- Loss terms -----------------------------------------------------------------------------------
# Each takes the loss, an output `[1, ...]` and a target `[1, ...]` of one sample, and returns the
# sample's terms l_t (scalars) and their shares of the denominator of the reduction "mean".

Terms = tuple[list[Tensor], list[float]]


def _vectors(x: Tensor, axis: int) -> Tensor:
    """All vectors of one sample along an axis, `[1, ...] -> [T, C]`; `[1]` is one of length one."""
    x = x.reshape(-1).reshape(x.shape)  # PyTorch's kernels rely on canonical strides of gradients
    return x.reshape(1, 1) if x.ndim == 1 else x.movedim(axis, -1).reshape(-1, x.shape[axis])


def _cross_entropy(loss: nn.CrossEntropyLoss, output: Tensor, target: Tensor) -> Terms:
    logits = _vectors(output, 1)
    C = logits.shape[1]
    weight = torch.ones(C, dtype=output.dtype) if loss.weight is None else loss.weight
    soft = target.is_floating_point()
    terms, shares = [], []
    for z, y in zip(logits, _vectors(target, 1) if soft else target.reshape(-1), strict=True):
        if not soft and y == loss.ignore_index:
            continue
        shares.append(1.0 if soft else weight[y].item())
        q = y if soft else torch.eye(C, dtype=output.dtype)[y]
        q = (1 - loss.label_smoothing) * q + loss.label_smoothing / C
        terms.append(-(weight * q * (z - z.logsumexp(0))).sum())
    return terms, shares


def _nll(loss: nn.NLLLoss, output: Tensor, target: Tensor) -> Terms:
    terms, shares = [], []
    for log_p, y in zip(_vectors(output, 1), target.reshape(-1), strict=True):
        if y == loss.ignore_index:
            continue
        weight = 1.0 if loss.weight is None else loss.weight[y].item()
        terms.append(-weight * log_p[y])
        shares.append(weight)
    return terms, shares


def _along_last_axis(values: Tensor, loss: nn.Module) -> Terms:
    rows = _vectors(values, -1)
    k = 1 / rows.shape[1] if loss.reduction == "mean" else 1.0
    return [k * row.sum() for row in rows], [1.0] * len(rows)


def _mse(loss: nn.MSELoss, output: Tensor, target: Tensor) -> Terms:
    return _along_last_axis((output - target) ** 2, loss)


def _bce(loss: nn.BCEWithLogitsLoss, output: Tensor, target: Tensor) -> Terms:
    positive = 1.0 if loss.pos_weight is None else loss.pos_weight
    weight = 1.0 if loss.weight is None else loss.weight
    log_p = -torch.logaddexp(torch.zeros_like(output), -output)
    log_q = -torch.logaddexp(torch.zeros_like(output), output)
    values = -weight * (positive * target * log_p + (1 - target) * log_q)
    return _along_last_axis(values, loss)


def _elementwise(value: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> Callable[..., Terms]:
    """One term per sample: the elements' sum, or mean for the reduction "mean"."""

    def terms(loss: nn.Module, output: Tensor, target: Tensor) -> Terms:
        values = value(loss, output, target)
        return [values.mean() if loss.reduction == "mean" else values.sum()], [1.0]

    return terms


def _l1(loss: nn.L1Loss, output: Tensor, target: Tensor) -> Tensor:
    return (output - target) * (output - target).sign().detach()


def _smooth_l1(loss: nn.SmoothL1Loss, output: Tensor, target: Tensor) -> Terms:
    e = output - target
    values = torch.where(e.abs() < loss.beta, e**2 / (2 * loss.beta), e.abs() - loss.beta / 2)
    return _along_last_axis(values, loss)


def _huber(loss: nn.HuberLoss, output: Tensor, target: Tensor) -> Terms:
    e = output - target
    outside = loss.delta * (e.abs() - loss.delta / 2)
    return _along_last_axis(torch.where(e.abs() < loss.delta, e**2 / 2, outside), loss)


def _poisson(loss: nn.PoissonNLLLoss, output: Tensor, target: Tensor) -> Terms:
    return _along_last_axis(output.exp() - target * output, loss)


def _kl_div(loss: nn.KLDivLoss, output: Tensor, target: Tensor) -> Tensor:
    return target * (target.log() - output)


_TERMS: dict[type, Callable[..., Terms]] = {
    nn.CrossEntropyLoss: _cross_entropy,
    nn.NLLLoss: _nll,
    nn.MSELoss: _mse,
    nn.BCEWithLogitsLoss: _bce,
    nn.L1Loss: _elementwise(_l1),
    nn.SmoothL1Loss: _smooth_l1,
    nn.HuberLoss: _huber,
    nn.PoissonNLLLoss: _poisson,
    nn.KLDivLoss: _elementwise(_kl_div),
}


def _terms(p: Problem, output: Tensor, target: Any) -> Terms:
    if not isinstance(p.loss, nn.Module):
        return [p.loss(output, target)], [1.0]  # a user's function: one term per sample
    return _TERMS[type(p.loss)](deepcopy(p.loss).double(), output, target)


# --- Model evaluation -----------------------------------------------------------------------------


def _double(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


@contextmanager
def evaluation(p: Problem) -> Iterator[tuple[list[Tensor], Callable[[Any], Tensor]]]:
    """Float64 leaves of the parameters, and the model as a function of X that uses them.

    A context, because checkpointed models recompute in the backward pass. Values are written into
    a copy's own parameters, not substituted per call, for the same reason. The math kernel is the
    only attention with second derivatives, and the fast path of nn.MultiheadAttention has none.
    """
    named = p.named_params()
    if p.reference_model is not None or not isinstance(p.model, nn.Module):
        function = p.reference_model or p.model
        copies = {k: v.detach().double().clone().requires_grad_() for k, v in named.items()}
        leaves = list(copies.values())

        def forward(X: Any) -> Tensor:
            return function(copies, X)
    else:
        forward = deepcopy(p.model).double()
        leaves = [forward.get_parameter(name) for name in named]
        for leaf, value in zip(leaves, named.values(), strict=True):
            leaf.data.copy_(value.detach())
            leaf.requires_grad_()
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH), torch.enable_grad():
            yield leaves, forward
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)


def samples(p: Problem) -> Iterator[tuple[Any, Any]]:
    """Inputs and targets of one sample each, batch axis kept, in float64."""
    for X, y in p.data:
        for n in range(len(tree_leaves(X)[0])):
            one = [
                tree_map(lambda t, n=n: _double(t)[n : n + 1] if isinstance(t, Tensor) else t, part)
                for part in (X, y)
            ]
            yield one[0], one[1]


def _grad(scalar: Tensor, leaves: list[Tensor], create_graph: bool = False) -> Tensor:
    """Flat gradient `[D]`; zeros where the scalar is constant."""
    if not scalar.requires_grad:
        return torch.cat([torch.zeros_like(leaf).flatten() for leaf in leaves])
    grads = torch.autograd.grad(
        scalar, leaves, retain_graph=True, create_graph=create_graph,
        allow_unused=True, materialize_grads=True,
    )  # fmt: skip
    return torch.cat([g.flatten() for g in grads])


def _rows(scalars: Iterable[Tensor], leaves: list[Tensor]) -> Tensor:
    """Jacobian of some scalars, one row `[D]` each."""
    rows = [_grad(scalar, leaves) for scalar in scalars]
    D = sum(leaf.numel() for leaf in leaves)
    return torch.stack(rows).detach() if rows else leaves[0].new_zeros(0, D)


# --- Quantities -----------------------------------------------------------------------------------


def denominator(p: Problem) -> tuple[int, float]:
    """Number of terms, and what the reduction "mean" divides by, over all data."""
    count, total = 0, 0.0
    with evaluation(p) as (_, forward):
        for x, y in samples(p):
            terms, shares = _terms(p, forward(x), y)
            count, total = count + len(terms), total + sum(shares)
    return count, total


def normalization(p: Problem) -> float:
    """The factor c in front of the sum over terms."""
    reduction = p.reduction if p.reduction is not None else p.loss.reduction
    return 1.0 if reduction == "sum" else 1 / denominator(p)[1]


def loss_value(p: Problem) -> float:
    """Empirical risk c * sum_t l_t."""
    with evaluation(p) as (_, forward):
        total = sum(t.item() for x, y in samples(p) for t in _terms(p, forward(x), y)[0])
    return normalization(p) * total


def term_gradients(p: Problem) -> list[Tensor]:
    """Per sample the gradients of its terms, `[T_n, D]` each, without c; T_n may be zero."""
    with evaluation(p) as (leaves, forward):
        return [_rows(_terms(p, forward(x), y)[0], leaves) for x, y in samples(p)]


def per_sample_gradients(p: Problem) -> Tensor:
    """Row n is the sum of the gradients of sample n's terms, `[N, D]`, without c."""
    return torch.stack([rows.sum(0) for rows in term_gradients(p)])


def gradient(p: Problem) -> Tensor:
    """Gradient of the risk, `[D]`."""
    return normalization(p) * per_sample_gradients(p).sum(0)


def hessian(p: Problem) -> Tensor:
    """Second derivative of the risk, `[D, D]`."""
    result = 0.0
    with evaluation(p) as (leaves, forward):
        for x, y in samples(p):
            terms, _ = _terms(p, forward(x), y)
            if terms:
                g = _grad(sum(terms), leaves, create_graph=True)
                result = result + _rows(g, leaves)
    return normalization(p) * result


def ggn(p: Problem) -> Tensor:
    """c * sum_t J_t^T H_t J_t, `[D, D]`; terms of one sample act on disjoint outputs."""
    result = 0.0
    with evaluation(p) as (leaves, forward):
        for x, y in samples(p):
            output = forward(x)
            J = _rows(output.flatten(), leaves)
            z = output.detach().requires_grad_()
            H = _rows(_grad(sum(_terms(p, z, y)[0], 0 * z.sum()), [z], create_graph=True), [z])
            result = result + J.T @ H @ J
    return normalization(p) * result


def empirical_fisher(p: Problem, terms: str = "term") -> Tensor:
    """c * sum_t g_t g_t^T, `[D, D]`; `terms="sample"` adds up a sample's terms first."""
    assert terms in ("term", "sample")
    rows = per_sample_gradients(p) if terms == "sample" else torch.cat(term_gradients(p))
    return normalization(p) * rows.T @ rows


def jacobian(p: Problem) -> Tensor:
    """Derivative of all outputs, `[N * C, D]`: batches in order, each flattened row-major."""
    with evaluation(p) as (leaves, forward):
        return torch.cat([_rows(forward(x).flatten(), leaves) for x, _ in samples(p)])
