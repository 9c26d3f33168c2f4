"""Times ways to compute the same, layer by layer, on the CPU."""

import argparse
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

HERE = Path(__file__).parent

#: A layer in words; ways to compute a quantity of it; and which of them the package takes.
Row = tuple[str, dict[str, Callable[[], object]], str]


def machine(device: str) -> str:
    """Describe what was measured on."""
    if device == "cuda":
        where = torch.cuda.get_device_name()
    else:
        info = Path("/proc/cpuinfo")
        lines = info.read_text().splitlines() if info.exists() else []
        models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
        where = (
            f"{models[0] if models else platform.processor()}, {torch.get_num_threads()} threads"
        )
    return f"{where}; PyTorch {torch.__version__}, Python {platform.python_version()}"


def times(found: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Return the least time of each way in milliseconds, after one call; they take turns."""
    best = dict.fromkeys(found, float("inf"))
    for number in range(repeats + 1):
        for name, run in found.items():
            start = time.perf_counter()
            run()
            if number:
                best[name] = min(best[name], 1e3 * (time.perf_counter() - start))
    return best


def main(
    script: str, about: str, layers: Sequence[tuple], row: Callable[[tuple, torch.dtype], Row]
) -> None:
    """Time all layers, print a table, and write it to a page of the script's name.

    Args:
        script: The script's path.
        about: What is computed.
        layers: The layers.
        row: Takes a layer and the dtype.
    """
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--layers", type=int, default=len(layers), help="only the first ones")
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64"])
    parser.add_argument("--output", type=Path, default=HERE / "results")
    args = parser.parse_args()
    lines = [f"Measured on: {machine('cpu')}, {args.dtype}. In milliseconds.", ""]
    for number, layer in enumerate(layers[: args.layers]):
        name, found, taken = row(layer, getattr(torch, args.dtype))
        if number == 0:
            lines += [f"| | {' | '.join(found)} |", "|---" * (len(found) + 1) + "|"]
        best = times(found, args.repeats)
        cells = (f"**{t:.2f}**" if way == taken else f"{t:.2f}" for way, t in best.items())
        lines.append(f"| {name} | {' | '.join(cells)} |")
    page = "\n".join([*lines, ""])
    args.output.mkdir(exist_ok=True, parents=True)
    (args.output / f"{Path(script).stem}.md").write_text(page)
    print(page)
