"""Factors in files: they are computed part by part, written, and mapped to memory."""

from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import torch

from curvlinops.linear_operator.space import ParameterSpace
from curvlinops.operators.kfac.blocks import Uses, layers_of
from curvlinops.operators.kfac.kfac import KroneckerFactoredLinearOperator
from curvlinops.operators.kfac.layout import assemble, matrices
from curvlinops.operators.kfac.partition import divided, units
from curvlinops.operators.kfac.sums import FactorSums
from curvlinops.risk.key import key_of
from curvlinops.structured.base import StructuredLinearOperator
from curvlinops.structured.block_diagonal import BlockDiagonalLinearOperator
from curvlinops.support.arguments import as_device, check_count
from curvlinops.support.files import read, read_parts, unpack, write_part
from curvlinops.support.torch_modes import in_default_modes


@in_default_modes
def write_factors(
    operator: KroneckerFactoredLinearOperator, directory: str | Path, parts: int = 1
) -> BlockDiagonalLinearOperator:
    """Compute the factors of KFAC or EKFAC in parts, and write them to a directory.

    Each part takes a pass over the data (EKFAC: two), with the memory of its own factors. A pass
    before, without gradients, finds out how to divide the layers. Layers that share a factor are
    written to one file. If the computation is killed, the same call continues it: files that exist
    are not computed again. Several processes may write to one directory.

    Args:
        operator: A KFAC or EKFAC operator. It does not keep the factors; its method ``load`` reads
            them. With a ``process_group``, all processes call the function with one directory.
        directory: The directory, which may not exist yet. Its files must belong to the same
            options, model, loss, and first batch, which are compared by numbers.
        parts: The number of parts.

    Returns:
        The approximation, which needs neither model nor data: ``load(directory)`` on the operator's
        device.

    Raises:
        ValueError: If the directory has factors of something else, or damaged files.
        OSError: If files cannot be written.
    """
    if not isinstance(operator, KroneckerFactoredLinearOperator):
        raise TypeError(f"Only KFAC and EKFAC have factors, got {type(operator).__name__}.")
    parts, path, ranks = check_count("parts", parts), Path(directory), operator.risk.ranks
    with ranks.sending():
        options = operator._key_options() | {"number of batches": operator.risk.data.length}
        key = key_of(operator, options)
    key = ranks.gather_objects(key)[0]
    with ranks.sending():
        found = read_parts(path, FactorSums, torch.device("cpu"), key) if ranks.rank == 0 else ()
        there = {name for part in found for name in part.value.space.names}
        if ranks.rank == 0 and not there.issuperset(operator.space.names):
            path.mkdir(parents=True, exist_ok=True)
    there = ranks.gather_objects(there)[0]
    with ranks.raise_on_all_ranks():
        if not path.is_dir():
            raise ValueError(
                f"{path} is not the directory of the first process. All processes must have the "
                "same one, on a file system that they share."
            )
    for names in _passes(operator, parts, there):
        sums = operator._compute(operator._no_sums(names))
        with ranks.raise_on_all_ranks():
            for unit in units(sums.uses, sums.space.names):
                if sums.placement.holders(unit)[0] == ranks.rank:
                    write_part(path, sums.part(unit), key)
        del sums
    number = operator._num_samples
    with ranks.raise_on_all_ranks():
        return _read(path, operator.device, number)


def _passes(
    operator: KroneckerFactoredLinearOperator, num: int, there: set[str]
) -> list[list[str]]:
    """Return the parameters of each pass, without those whose files exist."""
    missing = [name for name in operator.space.names if name not in there]
    if num == 1 or not missing:
        return [missing] if missing else []
    number = divided(_all_uses(operator), operator.space.shapes, operator.max_factor_size, num)
    passes = ([name for name in missing if number[name] == i] for i in range(num))
    return [names for names in passes if names]


def _all_uses(operator: KroneckerFactoredLinearOperator) -> Uses:
    """Return the uses of parameters in all data: later ones may join a weight and a bias."""
    uses, reduced = Uses(), operator._options.reduced
    sums = operator._no_sums(operator.space.names)
    with operator._on_all_ranks("partitions"), operator._batches("partitions") as problems:
        for _, samples in operator._forward_passes(problems, sums):
            layers = layers_of(samples, reduced)
            uses = uses.union(Uses(frozenset(layers), samples.fallbacks))
    return reduce(Uses.union, operator.risk.ranks.gather_objects(uses))


@in_default_modes
def load(
    source: str | Path | Mapping[str, Any], device: torch.device | str = "cpu"
) -> StructuredLinearOperator:
    """Return a structured operator that was saved: an inverse, a damped KFAC, a power.

    It has the structure, the precision and the parameters' names of the one that was saved, and
    needs neither model nor data. No code in the file is run. On the CPU files are mapped to memory,
    and read when they are used: they must not be written to afterwards.

    Args:
        source: The file that its method ``save`` wrote, or what ``state_dict`` returned; or the
            directory of ``write_factors``, for the approximation without damping.
        device: The device of the operator.

    Raises:
        ValueError: If there is no structured operator, it is damaged or incomplete, or of another
            version.
    """
    device = as_device(device)
    if isinstance(source, Mapping):
        return unpack(source, StructuredLinearOperator, device).value
    if Path(source).is_dir():
        return _read(Path(source), device)
    return read(source, StructuredLinearOperator, device).value


def _read(
    path: Path, device: torch.device, num_samples: int | None = None
) -> BlockDiagonalLinearOperator:
    """Return the approximation, on the parameters of the operator that computed the factors."""
    parts = list(read_parts(path, FactorSums, device))
    if not parts:
        raise ValueError(
            f"The directory {path} has no factors. Compute them by write_factors. All processes "
            "must have the same directory."
        )
    first, key, _ = parts[0]
    shapes = {name: key[f"the shape of {name}"] for name in key["parameters"]}
    space = ParameterSpace(shapes, first.space.dtype, device)
    all_sums = (part.value for part in parts)
    sums = FactorSums.joined(f"directory {path}", all_sums, space, first.options, num_samples)
    return BlockDiagonalLinearOperator(*assemble(matrices(sums), sums))
