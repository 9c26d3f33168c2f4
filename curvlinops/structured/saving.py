"""What structured operators consist of, to be saved."""

import json
from pathlib import Path
from typing import Any

from curvlinops.support.records import write, write_state
from curvlinops.support.torch_modes import in_default_modes

#: Of what is saved. It changes when older files cannot be read any more.
FORMAT = "structured operator 2"


class Saveable:
    """What a structured operator consists of, as plain tensors and metadata."""

    @in_default_modes
    def state_dict(self) -> dict[str, Any]:
        """Return what the operator consists of: tensors by name, and metadata as a string.

        ``load`` makes an operator of it. Do not write to the tensors: they are the operator's own.

        Raises:
            NotImplementedError: If the operator, or a part of it, is of a class of your own.
        """
        data, tensors = write(self)
        return {"metadata": json.dumps({"format": FORMAT, "operator": data}), **tensors}

    def save(self, path: str | Path) -> None:
        """Write the operator to a safetensors file, which ``load`` reads."""
        write_state(self.state_dict(), path)
