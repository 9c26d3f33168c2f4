"""Plants mistakes in a copy of the package, one at a time, and tells which the tests notice.

`python test/house/mutations.py --number 20 --folder layers` plants 20 in one folder. Mistakes are
drawn at random from a seed: folders in proportion to their lines, then a kind, then a place. For
each, the tests that belong to its folder run until one fails, for at most two minutes.

Of 100 with seed 76 in layers, operators/kfac, risk, losses, structured, algorithms, team and
influence, the core tests that enter the changed code noticed 78. Four became rows: dots of an
equation that are several axes, random numbers of parameters without rules, a seed of nothing that
is drawn, the sum of diagonal factors. Of the other 18, 15 change no number by reading: they choose
ways by their memory or time, compare at equality, or change what no call has. For three, in
layers/samples.py, layers/sample_axis.py and team/scattering.py, nobody found a program whose
numbers change.
"""

import argparse
import ast
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "curvlinops"
#: The tests that belong to a folder: room/file, or tests of a file that has long ones.
TESTS = {
    "support": """
        messages/arguments support/norms support/digest risk/data risk/changes
        risk/linearized
        structured/structured files/files messages/mistakes_of_ours layers/batch_axis
        contract/modes kfac/module_factors
        distributed/parallel::test_together[core]""",
    "linear_operator": """
        linear_operator/algebra algorithms/as_operator linear_operator/compile
        contract/contract::test_kinds_of_vectors contract/contract::test_linear_and_adjoint
        linear_operator/vector_gradients::test_first_and_second_derivatives
        linear_operator/vector_gradients::test_transforms_are_refused risk/linearized
        distributed/parallel::test_together[core]""",
    "team": """
        distributed/team messages/errors
        distributed/parallel::test_together[core]""",
    "autodiff": """
        contract/contract::test_linear_and_adjoint
        contract/contract::test_single_products_of_large_models messages/errors
        risk/custom_functions autodiff/precision autodiff/used_modules autodiff/forward_mode
        contract/left_as_found contract/modes
        distributed/parallel::test_together[core]""",
    "autodiff/overrides": """
        autodiff/overrides autodiff/attention autodiff/forward_mode autodiff/zero_derivatives
        contract/left_as_found""",
    "risk": """
        contract/contract::test_blocks contract/contract::test_single_products_of_large_models
        risk/custom_functions autodiff/zero_derivatives messages/errors
        messages/mistakes_of_ours contract/models risk/data risk/model_facts risk/changes
        risk/linearized contract/modes""",
    "risk/checks": """
        risk/determinism risk/sample_coupling risk/custom_functions risk/backward_passes""",
    "losses": """
        losses/losses losses/unusual_losses losses/linear_cross_entropy risk/custom_functions
        messages/errors contract/models contract/contract::test_samples_are_unbiased
        contract/contract::test_equals_dense_reference""",
    "layers": """
        layers/uses layers/patches layers/kronecker_factors layers/rules kfac/kfac
        influence/per_sample::test_rows layers/batch_axis layers/reading layers/moved_rows
        layers/sample_axis""",
    "structured": """
        structured/structured support/norms kfac/kfac_inverse files/objects layers/uses
        linear_operator/algebra
        algorithms/eigsh::test_structured_operators_know_their_eigenpairs""",
    "algorithms": """
        algorithms/as_operator algorithms/submatrix algorithms/spectrum algorithms/estimators
        algorithms/inverses algorithms/eigsh algorithms/callbacks algorithms/intervals
        risk/linearized algorithms/results""",
    "operators": """
        contract/contract::test_linearized contract/contract::test_linear_and_adjoint
        contract/contract::test_blocks contract/contract::test_independent_of_batches
        contract/contract::test_independent_of_chunks messages/errors risk/custom_functions
        contract/memory""",
    "operators/kfac": """
        kfac/module_factors kfac/parts kfac/kfac_inverse kfac/updates files/objects
        kfac/kfac kfac/kfac_architectures kfac/kfac_padding kfac/fit kfac/distance""",
    "landscape": "landscape/by_layer landscape/loss_along algorithms/spectrum",
    "influence": "influence/store influence/queries influence/per_sample influence/scores",
    "training": "training/monitor training/kfac_preconditioner",
    "integrations": "integrations/huggingface integrations/trainer",
}

Node = ast.AST
#: Returns changed nodes in place of a node; none where the kind of mistake does not apply.
Kind = Callable[[Node], list[Node]]


def changed(node: Node, **fields: object) -> Node:
    """Return a copy of a node with other fields."""
    copy = deepcopy(node)
    for name, value in fields.items():
        setattr(copy, name, value)
    return copy


_OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult}
_COMPARISONS = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt},
    **{ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is},
    **{ast.In: ast.NotIn, ast.NotIn: ast.In},
}


def signs(node: Node) -> list[Node]:
    """Take another operator, or drop a minus or a negation."""
    if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in _OPERATORS:
        return [changed(node, op=_OPERATORS[type(node.op)]())]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
        return [node.operand]
    return []


def constants(node: Node) -> list[Node]:
    """Take another number, or the other truth value."""
    value = node.value if isinstance(node, ast.Constant) else None
    if isinstance(value, bool):
        return [changed(node, value=not value)]
    if isinstance(value, int):
        return [changed(node, value=value + 1)]
    return [changed(node, value=2 * value + 1)] if isinstance(value, float) else []


def axes(node: Node) -> list[Node]:
    """Drop a transposition, or swap the factors of a product."""
    if isinstance(node, ast.Attribute) and node.attr in ("T", "mT", "H"):
        return [node.value]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        moves = node.func.attr in ("transpose", "movedim", "permute", "swapaxes")
        return [node.func.value] if moves else []
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        return [changed(node, left=node.right, right=node.left)]
    return []


def terms(node: Node) -> list[Node]:
    """Drop a term of a sum, a condition, or a whole statement."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub | ast.Mult):
        return [node.left, node.right]
    if isinstance(node, ast.BoolOp):
        return [changed(node, values=node.values[:-1]), changed(node, values=node.values[1:])]
    if isinstance(node, ast.AugAssign) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    ):
        return [ast.Pass()]
    return []


def comparisons(node: Node) -> list[Node]:
    """Take another comparison."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return [changed(node, ops=[_COMPARISONS[type(node.ops[0])]()])]
    return []


def crashes(node: Node) -> list[Node]:
    """Let a function raise an error, which must not be taken for one of the user's code."""
    if isinstance(node, ast.FunctionDef):
        return [changed(node, body=[ast.Raise(ast.Name("NameError"))], decorator_list=[])]
    return []


KINDS: list[Kind] = [signs, constants, axes, terms, comparisons, crashes]


@dataclass(frozen=True)
class Mistake:
    """A change of a node of a file."""

    path: Path
    node: Node
    new: Node

    def texts(self) -> tuple[bytes, str, str, bytes]:
        """Return the file's text up to the node, the node's, the new one's, and the rest."""
        lines = self.path.read_bytes().splitlines(keepends=True)
        start, end = (
            sum(map(len, lines[: line - 1])) + column  # columns are counted in bytes
            for line, column in (
                (self.node.lineno, self.node.col_offset),
                (self.node.end_lineno, self.node.end_col_offset),
            )
        )
        source, new = b"".join(lines), ast.unparse(self.new)
        if isinstance(self.new, ast.FunctionDef):
            new = " ".join(new.split())  # in one line, whatever its indentation
        new = new if isinstance(self.node, ast.stmt) else f"({new})"
        return source[:start], source[start:end].decode(), new, source[end:]

    def source(self) -> bytes | None:
        """Return the changed file; none if it is the same program."""
        before, _, new, after = self.texts()
        whole = before + new.encode() + after
        same = ast.dump(ast.parse(whole)) == ast.dump(ast.parse(self.path.read_bytes()))
        return None if same else whole

    def __str__(self) -> str:
        """Return where it is, and what."""
        where = f"{self.path.relative_to(PACKAGE)}:{self.node.lineno}"
        old, new = (" ".join(text.split())[:70] for text in self.texts()[1:3])
        return f"{where:40} {old}  ->  {new}"


def code(node: Node) -> Iterator[Node]:
    """Yield the nodes that compute: no annotations, imports, strings or messages."""
    if isinstance(node, ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom):
        return
    if isinstance(node, ast.Call) and "warn" in ast.unparse(node.func):
        return
    children = list(ast.iter_child_nodes(node))
    if not (isinstance(node, ast.BinOp) and any(map(_is_text, children))):
        yield node
    annotations = getattr(node, "annotation", None), getattr(node, "returns", None)
    for child in children:
        if child not in annotations:
            yield from code(child)


def _is_text(node: Node) -> bool:
    constant = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return constant or isinstance(node, ast.JoinedStr)


def folders() -> dict[str, list[Path]]:
    """Return the files by folder; those of the package itself belong to no tests of their own."""
    found = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        found[str(path.parent.relative_to(PACKAGE))].append(path)
    del found["."]
    return dict(found)


def drawn(seed: int, number: int, wanted: list[str]) -> Iterator[tuple[str, Mistake]]:
    """Draw mistakes, with their folders."""
    rng = random.Random(seed)
    files = {folder: paths for folder, paths in folders().items() if folder in wanted}
    seen: set[str] = set()
    sizes = {f: sum(p.read_text().count("\n") for p in paths) for f, paths in files.items()}
    for turn in range(number):
        # evenly along all lines, so that no folder has more or less than its share
        at = (turn + rng.random()) / number * sum(sizes.values())
        folder = next(f for f in files if (at := at - sizes[f]) <= 0)
        mistake = None
        while mistake is None or str(mistake) in seen or mistake.source() is None:
            kind = rng.choice(KINDS)
            nodes = ((p, node) for p in files[folder] for node in code(ast.parse(p.read_bytes())))
            found = [Mistake(p, node, new) for p, node in nodes for new in kind(node)]
            mistake = rng.choice(found) if found else None  # some kinds do not occur in a folder
        seen.add(str(mistake))
        yield folder, mistake


def tests(folder: str) -> list[str]:
    """Return a folder's tests as pytest takes them."""
    names = (name.partition("::") for name in TESTS[folder].split())
    paths = ((*file.split("/"), colons + test) for file, colons, test in names)
    return [f"{ROOT}/test/{room}/test_{name}.py{test}" for room, name, test in paths]


def verdict(folder: str, mistake: Mistake, copy: Path, seconds: float) -> tuple[str, str]:
    """Run a folder's tests on the copy of the package with a mistake.

    Returns:
        What happened, and the test that noticed the mistake.
    """
    target = copy / mistake.path.relative_to(ROOT)
    options = ["-x", "-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml")]
    environment = {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    target.write_bytes(mistake.source())
    # the folder in which it runs comes first among those of which Python imports
    with subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, *tests(folder)],
        cwd=copy,
        env=os.environ | environment | {"OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        try:
            output = process.communicate(timeout=seconds)[0].decode()
            failed = re.findall(r"^(?:FAILED|ERROR) \S*?test/(\S+)", output, re.MULTILINE)
            return "noticed" if process.returncode else "NOT NOTICED", "".join(failed[:1])
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with what tests have started
            return "timed out", ""
        finally:
            target.write_bytes(mistake.path.read_bytes())


def main() -> None:
    """Draw, run, and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--number", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=120, help="of the tests of a mistake")
    parser.add_argument("--folder", nargs="+", choices=TESTS, default=list(TESTS))
    args = parser.parse_args()
    verdicts: dict[str, Counter[str]] = defaultdict(Counter)
    with tempfile.TemporaryDirectory() as name:
        shutil.copytree(PACKAGE, Path(name) / PACKAGE.name)
        for folder, mistake in drawn(args.seed, args.number, args.folder):
            found, by = verdict(folder, mistake, Path(name), args.seconds)
            verdicts[folder][found] += 1
            print(f"{found:12} {mistake}{by and f'  by {by}'}", flush=True)
    verdicts["all"] = sum(verdicts.values(), Counter())
    for folder, counts in verdicts.items():
        share = f"{counts['noticed']} of {counts.total()} noticed"
        print(f"{folder:20} {share:20} {counts['timed out']} timed out")


if __name__ == "__main__":
    main()
