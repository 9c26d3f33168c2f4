"""Inner products of the gradients of all samples of all batches."""

from collections.abc import Iterator
from itertools import accumulate, combinations_with_replacement

import torch
from einops import rearrange
from torch import Tensor

from curvlinops.layers.covariance import add_second_moment, mirror
from curvlinops.layers.gradients import BYTES, PerSampleGradient
from curvlinops.layers.outer import OuterProducts

#: Gradients of a batch, some of its samples, and the rows of the result that these have.
Block = list[tuple[PerSampleGradient, slice, Tensor]]


def gram(batches: list[dict[str, PerSampleGradient]], like: Tensor) -> Tensor:
    """Return the inner products of all gradients, by batch, then vector, then sample, ``[R, R]``.

    Each batch has gradients ``[V, N]`` of V vectors and N samples, by parameter.
    """
    batches = [gradients for gradients in batches if _first(gradients).num_samples]
    size = sum(_num_rows(_first(gradients)) for gradients in batches)
    out = like.new_zeros(size, size)
    for name in batches[0] if batches else ():
        _add([gradients[name] for gradients in batches], out)
    if size:
        mirror(out.unsqueeze(0))
    return out


def _first(gradients: dict[str, PerSampleGradient]) -> PerSampleGradient:
    return next(iter(gradients.values()))


def _num_rows(gradient: PerSampleGradient) -> int:
    return gradient.num_vectors * gradient.num_samples


def _add(gradients: list[PerSampleGradient], out: Tensor) -> None:
    """Add the inner products on and above the diagonal, for one parameter."""
    pairs = list(combinations_with_replacement(range(len(gradients)), 2))
    if all(gradients[i].prefers_inner_products(gradients[j]) for i, j in pairs):
        ends = list(accumulate(map(_num_rows, gradients)))
        rows = [slice(end - _num_rows(x), end) for end, x in zip(ends, gradients, strict=True)]
        for i, j in pairs:
            products = gradients[i].inner_products(gradients[j])
            out[rows[i], rows[j]] += rearrange(products, "v n w m -> (v n) (w m)")
        return
    for piece in _pieces(gradients, len(out)):
        _add_products(piece, out)


def _pieces(gradients: list[PerSampleGradient], num_rows: int) -> Iterator[list[PerSampleGradient]]:
    """Yield the gradients with respect to some outputs' weights at a time that fit the memory."""
    outer = all(isinstance(gradient, OuterProducts) for gradient in gradients)
    if not outer or len({gradient.layout for gradient in gradients}) > 1:
        yield gradients
        return
    if sum(gradient.num_samples * gradient.num_inputs for gradient in gradients) * 4 <= BYTES:
        gradients = [gradient.with_patches() for gradient in gradients]
    outputs = gradients[0].g.shape[-1]
    step = max(BYTES // 2 * outputs // max(4 * num_rows * gradients[0].entries.view.size, 1), 1)
    for start in range(0, outputs, step):
        yield [gradient.of_outputs(slice(start, start + step)) for gradient in gradients]


def _add_products(gradients: list[PerSampleGradient], out: Tensor) -> None:
    """Write gradients down, as many at once as fit the memory, and add their inner products."""
    blocks = list(_blocks(gradients, out))
    if len(blocks) == 1:
        rows = _written(blocks[0], out)
        if len(blocks[0]) > len(gradients):  # the rows of several vectors alternate
            rows = rows[_rows(blocks[0]).argsort()]
        add_second_moment(out.unsqueeze(0), rows.unsqueeze(0))
        return
    for i, first in enumerate(blocks):
        left = _written(first, out)
        for second in blocks[i:]:
            right = left if second is first else _written(second, out)
            products = left @ right.T
            rows, columns = _rows(first), _rows(second)
            out[rows[:, None], columns] += products
            if second is not first:
                out[columns[:, None], rows] += products.T


def _blocks(gradients: list[PerSampleGradient], out: Tensor) -> Iterator[Block]:
    """Yield samples whose gradients fit the memory at once."""
    block, size, start = [], 0, 0
    for gradient in gradients:
        rows = torch.arange(start, start + _num_rows(gradient), device=out.device)
        rows = rows.reshape(gradient.num_vectors, gradient.num_samples)
        start += rows.numel()
        for samples in gradient.slices():
            more = rows[:, samples].numel() * gradient.num_entries * 4
            if block and size + more > BYTES:
                yield block
                block, size = [], 0
            block.append((gradient, samples, rows[:, samples].flatten()))
            size += more
    yield block


def _rows(block: Block) -> Tensor:
    """Return the rows of the result that belong to a block."""
    return torch.cat([rows for *_, rows in block])


def _written(block: Block, out: Tensor) -> Tensor:
    """Return gradients as rows."""
    written = [x.rows(samples).reshape(len(rows), x.num_entries) for x, samples, rows in block]
    return (written[0] if len(written) == 1 else torch.cat(written)).to(out)
