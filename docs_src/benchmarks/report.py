"""Writes the results as Markdown, and draws them."""

from pathlib import Path

OURS = ("ours", "checked")
#: The relative difference of numbers from which on a package computes something else.
WRONG = 1e-3


def table(results: dict) -> str:
    """Write results as Markdown."""
    peers = ", ".join(f"{name} {version}" for name, version in results["peers"].items())
    lines = [
        f"Commit {results['commit']}; {results['machine']}; {results['versions']}. "
        f"Peers: {peers or 'none'}.",
        "",
        *_imports(results["imports"]),
    ]
    for problem, result in results["problems"].items():
        unit = result["gradient"]
        lines += [f"**{problem}**: {result['about']} One gradient takes {1e3 * unit:.2f} ms.", ""]
        lines += _rows(result["rows"], lambda cell, unit=unit: _cell(cell, unit))
    for what, sizes in results["growth"].items():
        lines += [f"**Growth with {what}**, milliseconds for {', '.join(sizes)}", ""]
        rows: dict[str, dict] = {}
        for problem, found in sizes.items():
            for row, cells in found.items():
                for name, cell in cells.items():
                    rows.setdefault(row, {}).setdefault(name, dict.fromkeys(sizes))[problem] = cell
        lines += _rows(rows, _sizes)
    return "\n".join(lines)


def _rows(rows: dict, show) -> list[str]:
    packages = list(dict.fromkeys(name for cells in rows.values() for name in cells))
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


def _sizes(cells: dict) -> str:
    found = [cell and cell.get("seconds") for cell in cells.values()]
    return " / ".join("-" if seconds is None else f"{1e3 * seconds:.3g}" for seconds in found)


def _imports(seconds: dict[str, float]) -> list[str]:
    found = ", ".join(f"{name} {value:.2f} s" for name, value in seconds.items())
    return [f"CPU time of the import, after that of PyTorch: {found}.", ""]


def picture(results: dict, path: Path) -> None:
    """Draw this package's times over those of the fastest peer, and of code written by hand."""
    from matplotlib import pyplot as plt

    problems = results["problems"]
    rows = list(dict.fromkeys(row for result in problems.values() for row in result["rows"]))
    size = (max(7, 3.2 + 1.9 * len(problems)), 1 + 0.22 * len(rows))
    figure, axes = plt.subplots(
        1,
        len(problems),
        figsize=size,
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for ax, (problem, result) in zip(axes[0], problems.items(), strict=True):
        for peer, style in {"fastest peer": "o", "by hand": "x"}.items():
            pairs = [(i, _ratio(result["rows"].get(row, {}), peer)) for i, row in enumerate(rows)]
            found = [(ratio, i) for i, ratio in pairs if ratio]
            colors = ["tab:green" if ratio <= 1.05 else "tab:red" for ratio, _ in found]
            if found:
                ax.scatter(*zip(*found, strict=True), c=colors, marker=style, s=28, zorder=3)
        ax.axvline(1, color="black", linewidth=1)
        ax.set(title=problem, xscale="log", xlim=(0.05, 40))
        ax.set_xticks([0.1, 1, 10], ["0.1", "1", "10"])
        ax.xaxis.set_minor_locator(plt.NullLocator())
        ax.grid(alpha=0.3)
    axes[0][0].set_yticks(range(len(rows)), rows, fontsize=8)
    axes[0][0].set_ylim(len(rows) - 0.5, -0.5)
    handles = [
        plt.Line2D(
            [], [], linestyle="", color="gray", marker=style, label=f"time over that of {who}"
        )
        for who, style in {"the fastest peer": "o", "code by hand": "x"}.items()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _ratio(cells: dict, peer: str) -> float | None:
    right = {n: c for n, c in cells.items() if "seconds" in c and c.get("differs", 0) <= WRONG}
    seconds = {name: cell["seconds"] for name, cell in right.items()}
    others = {
        name: value
        for name, value in seconds.items()
        if name not in OURS and (name == "by hand") == (peer == "by hand")
    }
    return seconds["ours"] / min(others.values()) if others and "ours" in seconds else None
