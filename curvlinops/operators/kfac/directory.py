"""Factors in a directory: a manifest, and a file for each group of blocks that share factors."""

import json
from collections.abc import Iterator, Mapping
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from curvlinops.linear_operator.space import ParameterSpace
from curvlinops.operators.kfac.layout import assemble, with_matrices
from curvlinops.operators.kfac.options import Fallback, FisherType, Options
from curvlinops.operators.kfac.storage import pack, unpack
from curvlinops.operators.kfac.sums import FactorSums
from curvlinops.operators.origin import check_equal, plain
from curvlinops.structured.base import FORMAT as STRUCTURED
from curvlinops.structured.base import StructuredLinearOperator
from curvlinops.structured.block_diagonal import BlockDiagonalLinearOperator
from curvlinops.support.arguments import as_device
from curvlinops.support.serialization import from_state, read_state, replacing, write_state
from curvlinops.support.torch_modes import in_default_modes
from curvlinops.team.team import ALONE, Team

#: The format of manifests. It changes when older directories cannot be read any more.
FORMAT = "Kronecker factors in a directory 1"

_MANIFEST = "manifest.json"


class FactorDirectory:
    """A directory of factors, which are computed in parts.

    Each file is written under another name and renamed, the manifest of a part after its files. A
    process that is killed at any moment leaves complete parts, and perhaps files that are written
    anew.

    Args:
        path: The directory.
        ranks: The processes that write to it together. Default: one.

    Raises:
        ValueError: If there is something else at this path.
    """

    def __init__(self, path: str | Path, ranks: Team = ALONE):
        self._ranks, self.path = ranks, Path(path)
        with self._ranks.raise_on_all_ranks():
            manifest = self._found() if self._ranks.rank == 0 else {}
        self._manifest: dict[str, Any] = self._ranks.gather_objects(manifest)[0]

    def _found(self) -> dict[str, Any]:
        """Return the manifest in the directory; empty if it has none yet."""
        file = self.path / _MANIFEST
        if file.is_file():
            try:
                manifest = json.loads(file.read_text())
                is_known = manifest["format"] == FORMAT
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{file} is no manifest of factors: {error!r}.") from error
            if not is_known:
                raise ValueError(
                    f"{self.path} has the format {manifest['format']!r}, this version of the "
                    f"package has {FORMAT!r}. Delete the directory, and compute the factors anew."
                )
            return manifest
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise ValueError(
                f"{self.path} is no directory of factors: it has no {_MANIFEST}. Choose a "
                "directory that is empty, or does not exist."
            )
        return {}

    @property
    def parts(self) -> list[list[str]]:
        """The parameters of each part; empty before ``begin``."""
        return [part["names"] for part in self._manifest.get("parts", ())]

    def is_complete(self, index: int) -> bool:
        """Return whether a part was written."""
        return "blocks" in self._manifest["parts"][index]

    def check(self, settings: dict[str, Any]) -> None:
        """Refuse to continue with other settings.

        Raises:
            ValueError: If they differ, naming the first difference.
        """
        check_equal(f"directory {self.path}", self._manifest["settings"], plain(settings))

    def check_shared(self) -> None:
        """Refuse a directory that is not that of the first rank.

        Raises:
            ValueError: If this rank finds another manifest, or none.
            RuntimeError: If another rank does.
        """
        file = self.path / _MANIFEST
        with self._ranks.raise_on_all_ranks():
            if self._ranks.rank > 0 and not (
                file.is_file() and json.loads(file.read_text()) == self._manifest
            ):
                raise ValueError(
                    f"{self.path} is not the directory of the first rank. All ranks must have the "
                    "same directory, on a file system that they share."
                )

    def begin(self, settings: dict[str, Any], parts: list[list[str]]) -> None:
        """Begin anew.

        Args:
            settings: What the factors depend on, as plain values.
            parts: The parameters of each part.
        """
        old = [block["file"] for block in self._blocks()]
        parts = [{"names": names} for names in parts]
        self._manifest = {"format": FORMAT, "settings": plain(settings), "parts": parts}
        with self._ranks.raise_on_all_ranks():
            if self._ranks.rank == 0:
                self.path.mkdir(parents=True, exist_ok=True)
                self._write_manifest()
                for name in old:
                    (self.path / name).unlink(missing_ok=True)

    def write(self, index: int, sums: FactorSums) -> None:
        """Write a part; each rank writes what it owns."""
        blocks, rank = [], self._ranks.rank
        with self._ranks.raise_on_all_ranks():
            for names in sums.units():
                if sums.owners.get(names[0], 0) != rank:
                    continue
                number = sums.space.names.index(names[0])
                name = f"{index:04d}-{number:04d}.safetensors"
                write_state(pack(sums.part(names), self._identity), self.path / name)
                blocks.append({"names": names, "file": name})
        written = chain.from_iterable(self._ranks.gather_objects(blocks))
        self._manifest["parts"][index] |= {
            "num_batches": sums.num_batches,
            "weight": float(sums.weight),
            "blocks": sorted(written, key=lambda block: block["file"]),
        }
        with self._ranks.raise_on_all_ranks():
            if rank == 0:
                self._write_manifest()

    def structure(self, device: torch.device) -> BlockDiagonalLinearOperator:
        """Return the approximation, on the parameters of the operator that computed the factors."""
        settings = self._manifest["settings"]
        shapes = {name: tuple(shape) for name, shape in settings["parameters"]}
        space = ParameterSpace(shapes, getattr(torch, settings["dtype"].split(".")[1]), device)
        options = Options(
            FisherType(settings["fisher_type"]),
            settings["mc_samples"],
            settings["seed"],
            settings["exact"],
            frozenset(settings["reduced"]),
            not settings["separate_weight_and_bias"],
            Fallback(settings["fallback"]),
            settings["max_factor_size"],
        )
        sums = self.read(space, options)
        return assemble(with_matrices(sums), sums)

    def read(self, space: ParameterSpace, options: Options) -> FactorSums:
        """Return all means; on the CPU they are read from the files when they are used.

        Args:
            space: All parameters.
            options: The options of the approximation.

        Raises:
            ValueError: If a part or a file is missing, damaged or foreign.
        """
        if lacking := [i for i in range(len(self.parts)) if not self.is_complete(i)]:
            raise ValueError(
                f"{self.path} has {len(self.parts) - len(lacking)} of {len(self.parts)} parts of "
                "the factors. Continue their computation: build the operator with this directory."
            )
        parts = []
        with self._ranks.raise_on_all_ranks():
            for block in self._blocks():
                path, restricted = self.path / block["file"], space.restricted(block["names"])
                if not path.is_file():
                    raise ValueError(f"{path} is missing. Compute the factors anew.")
                parts.append(unpack(read_state(path), self._identity, restricted, options, False))
        return FactorSums.beside(parts, space, options)

    @property
    def _identity(self) -> dict[str, Any]:
        """What the files of one computation have in common, and no others."""
        text = json.dumps(self._manifest["settings"], sort_keys=True)
        return {"computation": sha256(text.encode()).hexdigest()}

    def _blocks(self) -> Iterator[dict[str, Any]]:
        for part in self._manifest.get("parts", ()):
            yield from part.get("blocks", ())

    def _write_manifest(self) -> None:
        with replacing(self.path / _MANIFEST) as file:
            file.write_text(json.dumps(self._manifest, indent=1))


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
            ``directory`` of a KFAC or EKFAC operator, for the approximation without damping.
        device: Where it goes.

    Raises:
        ValueError: If there is no structured operator, it is damaged or incomplete, or of another
            version.
    """
    if isinstance(source, str | Path) and Path(source).is_dir():
        return FactorDirectory(source).structure(as_device(device))
    state = source if isinstance(source, Mapping) else read_state(source)
    return from_state(state, STRUCTURED, StructuredLinearOperator, as_device(device))
