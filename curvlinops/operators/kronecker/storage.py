"""Sums over data as plain tensors and metadata, to be saved and loaded."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from curvlinops.core.space import ParameterSpace
from curvlinops.layers.factors import Kind
from curvlinops.layers.forms import Place
from curvlinops.layers.outer import Arrangement
from curvlinops.operators.kronecker.estimate import Factors, Sums
from curvlinops.operators.kronecker.options import Options
from curvlinops.operators.kronecker.plan import Block

FORMAT = 1


def pack(sums: Sums, space: ParameterSpace, options: Options) -> dict[str, Any]:
    """Return sums as tensors by name, and metadata in one string.

    Args:
        sums: The sums.
        space: The parameters.
        options: The options with which they were computed.
    """
    tensors: dict[str, Tensor] = {"terms": torch.as_tensor(sums.terms, dtype=torch.float64)}
    for (number, kind), factors in sums.products.items():
        prefix = f"{number}.{sums.blocks[number].kinds.index(kind)}"
        tensors[f"{prefix}.inputs"] = factors.inputs
        tensors[f"{prefix}.count"] = factors.count
        if factors.gradients is not None:
            tensors[f"{prefix}.gradients"] = factors.gradients
    for number, matrix in sums.matrices.items():
        tensors[f"{number}.matrix"] = matrix
    metadata = {
        "format": FORMAT,
        "fingerprint": fingerprint(space, options),
        "num_batches": sums.num_batches,
        "blocks": [_block_to_json(block) for block in sums.blocks],
    }
    return {"metadata": json.dumps(metadata), **tensors}


def unpack(
    state: Mapping[str, Any], space: ParameterSpace, options: Options
) -> tuple[Sums, dict[str, Tensor]]:
    """Return sums, and all other tensors.

    Args:
        state: What ``pack`` returned, perhaps with more tensors.
        space: The parameters, which must be the same.
        options: The options, which must be the same.

    Raises:
        ValueError: If the state is not of this kind, or of other parameters or options.
    """
    if "metadata" not in state:
        raise ValueError("This is not the state of a Kronecker-factored operator: no metadata.")
    metadata = json.loads(state["metadata"])
    if metadata.get("format") != FORMAT:
        raise ValueError(f"Unknown format {metadata.get('format')!r} of the saved state.")
    _compare(metadata["fingerprint"], fingerprint(space, options))
    blocks = [_block_from_json(block) for block in metadata["blocks"]]
    sums = Sums(blocks, num_batches=metadata["num_batches"])
    tensors = {
        name: value.to(space.device) for name, value in state.items() if isinstance(value, Tensor)
    }
    sums.terms = tensors.pop("terms")
    for number, block in enumerate(sums.blocks):
        for place, kind in enumerate(block.kinds):
            prefix = f"{number}.{place}"
            if f"{prefix}.inputs" in tensors:
                names = ("inputs", "count", "gradients")
                parts = (tensors.pop(f"{prefix}.{name}", None) for name in names)
                copies = (None if part is None else part.clone() for part in parts)
                sums.products[number, kind] = Factors(*copies)
        if f"{number}.matrix" in tensors:
            sums.matrices[number] = tensors.pop(f"{number}.matrix").clone()
    return sums, tensors


def write(state: Mapping[str, Any], path: str | Path) -> None:
    """Write a state to a safetensors file."""
    tensors = {n: value.contiguous() for n, value in state.items() if isinstance(value, Tensor)}
    save_file(tensors, str(path), {"metadata": state["metadata"]})


def read(path: str | Path) -> dict[str, Any]:
    """Read a state from a safetensors file.

    Raises:
        ValueError: If the file has no such state.
    """
    try:
        with safe_open(str(path), "pt") as file:
            metadata = file.metadata() or {}
            if "metadata" in metadata:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                return {**metadata, **tensors}
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file, such as save() writes.") from error
    raise ValueError(f"{path} is not the state of a Kronecker-factored operator.")


def fingerprint(space: ParameterSpace, options: Options) -> dict[str, Any]:
    """Return what must be equal for a state to be used."""
    return {
        "parameters": {name: list(shape) for name, shape in space.shapes.items()},
        "dtype": str(space.dtype),
        "fisher_type": str(options.fisher_type),
        "exact": options.exact,
        "reduced": sorted(options.reduced),
        "separate_weight_and_bias": not options.joint,
    }


def _compare(saved: dict[str, Any], own: dict[str, Any]) -> None:
    for key, value in own.items():
        if saved.get(key) != value or (isinstance(value, dict) and list(saved[key]) != list(value)):
            raise ValueError(
                f"The saved state has another {key}: {saved.get(key)}, this operator {value}."
            )


def _block_to_json(block: Block) -> dict[str, Any]:
    return {
        "names": block.names,
        "structure": block.structure,
        "kinds": [
            [k.groups, k.outputs, k.inputs, k.arrangement.stages, k.lookup, k.shift]
            for k in block.kinds
        ],
        "places": block.places,
        "scale": block.scale,
        "groups": block.groups,
        "twin": block.twin,
        "reason": block.reason,
    }


def _block_from_json(found: dict[str, Any]) -> Block:
    kinds = [
        Kind(*sizes, Arrangement(_as_tuples(stages)), *flags)
        for *sizes, stages, lookup, shift in found["kinds"]
        for flags in [(lookup, shift)]
    ]
    places = [
        None if place is None else Place(place[0], tuple(place[1]), tuple(place[2]))
        for place in found["places"]
    ]
    return Block(
        tuple(found["names"]),
        found["structure"],
        tuple(kinds),
        tuple(places),
        found["scale"],
        found["groups"],
        found["twin"],
        found["reason"],
    )


def _as_tuples(value: Any) -> Any:
    return tuple(_as_tuples(part) for part in value) if isinstance(value, list) else value
