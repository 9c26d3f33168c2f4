"""Writes the results as Markdown, and draws them.

`python docs_src/benchmarks/report.py` reads `results/cpu.json`, or the files that it is given, and
writes the tables and pictures beside it.
"""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

OURS, BY_HAND = "ours", "by hand"
#: What the name of a package ends with whose check at construction is switched off.
UNCHECKED = " unchecked"
#: The relative difference of numbers from which on a package computes something else.
WRONG = 1e-3
#: Ratios up to this one are called equal. So are smaller peaks of memory.
EQUAL, EQUAL_BYTES = 1.05, 2**17


def write(path: Path) -> None:
    """Write the tables and pictures of a file of results beside it."""
    results = json.loads(path.read_text())
    path.with_suffix(".md").write_text(table(results))
    rows = ratios(results, "seconds")
    picture(results, rows, "time", path.with_suffix(".png"))
    picture(results, ratios(results, "bytes"), "memory", path.with_name(f"{path.stem}-memory.png"))
    if results["growth"]:
        growth_picture(results["growth"], path.with_name(f"{path.stem}-growth.png"))


def table(results: dict) -> str:
    """Write results as Markdown."""
    peers = [f"{name} {version}" for name, version in results["peers"].items()]
    missing = [f"{name} ({_code(why)})" for name, why in results["missing"].items()]
    minutes = f" The run took {results['minutes']} minutes." if "minutes" in results else ""
    lines = [
        f"Commit {results['commit']}; {results['machine']}; {results['versions']}. "
        f"Peers: {', '.join(peers) or 'none'}."
        + (f" Peers that are missing: {', '.join(missing)}." if missing else "")
        + minutes,
        "",
        *_imports(results["imports"]),
        *_worse(results),
        "## Times and memory",
        "",
    ]
    for problem, result in results["problems"].items():
        unit = result["gradient"]
        lines += [f"**{problem}**: {result['about']} One gradient takes {1e3 * unit:.2f} ms.", ""]
        lines += _rows(result["rows"], lambda cell, unit=unit: _cell(cell, unit))
        lines += _refusals(result["rows"])
    lines += ["## Growth", ""] if results["growth"] else []
    for what, sizes in results["growth"].items():
        lines += [f"**Growth with {what}**, milliseconds for {', '.join(sizes)}", ""]
        lines += _rows(_by_row(sizes), _sizes)
    return "\n".join(lines)


def _code(text: str) -> str:
    return f"`{text.replace('`', '')}`"


def _by_row(sizes: dict) -> dict[str, dict]:
    """Return the cells of all sizes for each row and package."""
    rows: dict[str, dict] = {}
    for problem, found in sizes.items():
        for row, cells in found.items():
            for name, cell in cells.items():
                rows.setdefault(row, {}).setdefault(name, dict.fromkeys(sizes))[problem] = cell
    return rows


def _rows(rows: dict, show: Callable[[dict], str]) -> list[str]:
    found = dict.fromkeys(name for cells in rows.values() for name in cells)
    first = [name for name in (OURS, OURS + UNCHECKED, BY_HAND) if name in found]
    packages = [*first, *(name for name in found if name not in first)]
    lines = [f"| | {' | '.join(packages)} |", "|---" * (len(packages) + 1) + "|"]
    for row, cells in rows.items():
        found = [show(cells[name]) if name in cells else "" for name in packages]
        lines.append(f"| {row} | {' | '.join(found)} |")
    return [*lines, ""]


def _cell(cell: dict, unit: float) -> str:
    if "refused" in cell:
        return "-"
    size = cell.get("bytes", 0) / 2**20
    memory = f", {size:.1f} MiB" if size >= 0.05 else ""
    wrong = f", differs by {cell['differs']:.0e}" if cell.get("differs", 0) > WRONG else ""
    return f"{cell['seconds'] / unit:.2f} +{cell['spread']:.0%}{memory}{wrong}"


def _refusals(rows: dict) -> list[str]:
    """Say why cells have a dash."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for row, cells in rows.items():
        for name, cell in cells.items():
            if "refused" in cell:
                reasons.setdefault((name, cell["refused"]), []).append(row.rpartition(", ")[0])
    lines = [
        f"- {name}, {' and '.join(dict.fromkeys(found))}: {_code(why)}"
        for (name, why), found in reasons.items()
    ]
    return ["Dashes:", "", *lines, ""] if lines else []


def _sizes(cells: dict) -> str:
    found = [cell and cell.get("seconds") for cell in cells.values()]
    return " / ".join("-" if seconds is None else f"{1e3 * seconds:.3g}" for seconds in found)


def _imports(seconds: dict[str, float]) -> list[str]:
    found = ", ".join(f"{name} {value:.2f} s" for name, value in seconds.items())
    return [f"CPU time of the import, after that of PyTorch: {found}.", ""]


Ratios = dict[str, dict[str, dict[str, float]]]


def ratios(results: dict, what: str) -> Ratios:
    """Return this package's seconds or bytes over those of others.

    Returns:
        For each problem and row: over the best peer's, all with their defaults (`peer`), the same
        without checks (`unchecked`), and with the defaults over those of code by hand (`by hand`).
    """
    found: Ratios = {}
    for problem, result in results["problems"].items():
        for row, cells in result["rows"].items():
            right = {n: c[what] for n, c in cells.items() if _counts(c, what)}
            peers = {n for n in right if not n.endswith(UNCHECKED)} - {OURS, BY_HAND}
            pairs = {"peer": (OURS, peers), BY_HAND: (OURS, {BY_HAND} & right.keys())}
            if OURS + UNCHECKED in right:  # elsewhere there is no check
                unchecked = {n + UNCHECKED if n + UNCHECKED in right else n for n in peers}
                pairs[UNCHECKED] = OURS + UNCHECKED, unchecked
            found.setdefault(problem, {})[row] = {
                kind: right[own] / min(right[n] for n in others)
                for kind, (own, others) in pairs.items()
                if own in right and others
            }
    return found


def _counts(cell: dict, what: str) -> bool:
    enough = cell.get(what, 0) > (EQUAL_BYTES if what == "bytes" else 0)
    return enough and cell.get("differs", 0) <= WRONG


def _worse(results: dict) -> list[str]:
    """List where a peer takes less."""
    lines = ["## Where a peer is better", ""]
    verbs = {"seconds": "takes less time", "bytes": "needs less memory"}
    for what, verb in verbs.items():
        of_problems = ratios(results, what)
        pairs = [ratio for rows in of_problems.values() for ratio in rows.values()]
        count = sum("peer" in ratio for ratio in pairs)
        worse = sum(ratio.get("peer", 0) > EQUAL for ratio in pairs)
        lines += [
            f"A peer {verb} in {worse} of {count} comparisons, by more than {EQUAL - 1:.0%}"
            + (". This package over the best peer, all with their defaults:" if worse else "."),
            "",
        ]
        rows: dict[str, dict[str, float]] = {}
        for problem, found in of_problems.items():
            for row, ratio in found.items():
                if ratio.get("peer", 0) > EQUAL:
                    rows.setdefault(row, dict.fromkeys(of_problems, 0.0))[problem] = ratio["peer"]
        lines += _rows(rows, lambda ratio: f"{ratio:.2g}" if ratio else "") if rows else []
    return lines


def picture(results: dict, of_problems: Ratios, what: str, path: Path) -> None:
    """Draw this package's time or memory over that of the best peer, and of code by hand."""
    from matplotlib import pyplot as plt

    of_all = {name: result["rows"] for name, result in results["problems"].items()}
    # a row alone is in the tables
    problems = [name for name, rows in of_all.items() if len(rows) > 1] or list(of_all)
    rows = list(dict.fromkeys(row for problem in problems for row in of_all[problem]))
    size = (max(7, 3.2 + 1.4 * len(problems)), 1 + 0.22 * len(rows))
    options = {"sharex": True, "sharey": True, "squeeze": False, "layout": "constrained"}
    figure, axes = plt.subplots(1, len(problems), figsize=size, **options)
    styles = {
        "peer": {"marker": "o", "s": 28},
        UNCHECKED: {"marker": "o", "s": 28, "facecolors": "none"},
        BY_HAND: {"marker": "x", "s": 28},
    }
    for ax, problem in zip(axes[0], problems, strict=True):
        for kind, style in styles.items():
            found = [(of_problems[problem].get(row, {}).get(kind), i) for i, row in enumerate(rows)]
            for good, color in {True: "tab:green", False: "tab:red"}.items():
                some = [pair for pair in found if pair[0] and (pair[0] <= EQUAL) == good]
                if some:
                    colors = {"edgecolors": color} if "facecolors" in style else {"c": color}
                    ax.scatter(*zip(*some, strict=True), **style, **colors, zorder=3)
        ax.axvline(1, color="black", linewidth=1)
        ax.set_xscale("log")
        ax.set_title(problem, fontsize=10)
        ax.set_xlim(0.05, 40)
        ax.set_xticks([0.1, 1, 10], ["0.1", "1", "10"])
        ax.xaxis.set_minor_locator(plt.NullLocator())
        ax.grid(alpha=0.3)
    axes[0][0].set_yticks(range(len(rows)), rows, fontsize=8)
    axes[0][0].set_ylim(len(rows) - 0.5, -0.5)
    labels = {
        "peer": f"{what} over that of the best peer",
        UNCHECKED: "the same, all without checks at construction",
        BY_HAND: f"{what} over that of code by hand",
    }
    handles = []
    for kind, label in labels.items():
        color = {"edgecolors" if kind == UNCHECKED else "color": "gray"}
        handles.append(plt.scatter([], [], **styles[kind], **color, label=label))
    for color, label in (("tab:green", "at most as much"), ("tab:red", "more")):
        handles.append(plt.scatter([], [], marker="s", color=color, label=label))
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def growth_picture(growth: dict, path: Path) -> None:
    """Draw how times grow, a line for each package."""
    from matplotlib import pyplot as plt

    panels = [(what, row) for what, sizes in growth.items() for row in _by_row(sizes)]
    columns = 4
    lines = -(-len(panels) // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(12, 2.3 * lines), squeeze=False, layout="constrained"
    )
    packages = list(
        dict.fromkeys(n for s in growth.values() for r in _by_row(s).values() for n in r)
    )
    handles: dict[str, Any] = {}
    for ax, (what, row) in zip(axes.flat, panels, strict=False):
        for name, cells in _by_row(growth[what])[row].items():
            sizes = [float(re.findall(rf"{what}=(\d+)", problem)[0]) for problem in cells]
            pairs = zip(sizes, cells.values(), strict=True)
            points = [(x, 1e3 * cell["seconds"]) for x, cell in pairs if cell and "seconds" in cell]
            if points:
                style = {"color": f"C{packages.index(name)}", "marker": "o", "markersize": 4}
                width = 2.5 if name == OURS else 1.2
                handles[name] = ax.plot(*zip(*points, strict=True), **style, linewidth=width)[0]
        ax.set(xscale="log", yscale="log", xlabel=what)
        ax.set_xticks(sizes, [f"{size:g}" for size in sizes])
        ax.xaxis.set_minor_locator(plt.NullLocator())
        ax.yaxis.set_minor_formatter(plt.NullFormatter())
        ax.set_title(row, fontsize=8)
        ax.grid(alpha=0.3)
    for ax in axes.flat[len(panels) :]:
        ax.axis("off")
    figure.supylabel("milliseconds", fontsize=10)
    figure.legend(
        handles.values(), handles, loc="outside lower center", ncols=len(handles), frameon=False
    )
    figure.savefig(path, dpi=100)
    plt.close(figure)


if __name__ == "__main__":
    for name in sys.argv[1:] or [Path(__file__).parent / "results" / "cpu.json"]:
        write(Path(name))
