"""Inner products of the gradients of all samples of all batches."""

from collections.abc import Iterator
from itertools import accumulate, combinations_with_replacement

import torch
from torch import Tensor

from curvlinops.layers.covariance import add_second_moment, mirror
from curvlinops.layers.gradients import BYTES, PerSampleGradient
from curvlinops.layers.outer import OuterProducts

#: Samples of batches: their gradients, their places in the batch, and their rows in the result.
Block = list[tuple[PerSampleGradient, slice, Tensor]]


def gram(batches: list[dict[str, PerSampleGradient]], like: Tensor) -> Tensor:
    """Return the inner products of all gradients, ``[R, R]``.

    Args:
        batches: Gradients ``[V, N]`` of V vectors and N samples, by parameter, for each batch.
        like: Has the dtype and the device of the result.

    Returns:
        Rows and columns in the order of batches, then vectors, then samples.
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
        places = [slice(end - _num_rows(f), end) for end, f in zip(ends, gradients, strict=True)]
        for i, j in pairs:
            products = gradients[i].inner_products(gradients[j])
            out[places[i], places[j]] += products.flatten(2).flatten(0, 1)
        return
    for piece in _pieces(gradients, len(out)):
        _add_products(piece, out)


def _pieces(gradients: list[PerSampleGradient], num_rows: int) -> Iterator[list[PerSampleGradient]]:
    """Yield the gradients with respect to parts of the parameter that fit the memory."""
    outer = all(isinstance(gradient, OuterProducts) for gradient in gradients)
    if not outer or len({gradient.kind for gradient in gradients}) > 1:
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
            rows = rows[_places(blocks[0]).argsort()]
        add_second_moment(out.unsqueeze(0), rows.unsqueeze(0))
        return
    for i, first in enumerate(blocks):
        left = _written(first, out)
        for second in blocks[i:]:
            right = left if second is first else _written(second, out)
            found = left @ right.T
            rows, columns = _places(first), _places(second)
            out[rows[:, None], columns] += found
            if second is not first:
                out[columns[:, None], rows] += found.T


def _blocks(gradients: list[PerSampleGradient], out: Tensor) -> Iterator[Block]:
    """Yield samples whose gradients fit the memory at once."""
    block, size, start = [], 0, 0
    for gradient in gradients:
        places = torch.arange(start, start + _num_rows(gradient), device=out.device)
        places = places.reshape(gradient.num_vectors, gradient.num_samples)
        start += places.numel()
        for part in gradient.slices():
            place = places[:, part].flatten()
            more = len(place) * gradient.num_entries * 4
            if block and size + more > BYTES:
                yield block
                block, size = [], 0
            block.append((gradient, part, place))
            size += more
    yield block


def _places(block: Block) -> Tensor:
    """Return the rows of the result that belong to a block."""
    return torch.cat([place for *_, place in block])


def _written(block: Block, out: Tensor) -> Tensor:
    """Return gradients as rows."""
    rows = [each.rows(part).reshape(len(at), each.num_entries) for each, part, at in block]
    return (rows[0] if len(rows) == 1 else torch.cat(rows)).to(out)
