"""Answers for one version of the package, as told by lines on the standard input; see compare.py.

    compared.py FILE

Prints the path of the package. `problem NAME` makes a problem and answers with the names of its
rows and the precision of its parameters. `look ROW` writes the numbers of a first and a second
call to the file, and answers with the forward passes of each and their peak of memory in bytes; or
with how the row is refused. `time ROW` answers with the CPU seconds of both. All answers are JSON.

Only public names of the package occur here, because the files of its versions differ.
"""

import importlib.util
import json
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache, reduce
from itertools import islice
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NamedTuple

import problems
import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path
from worker import peak_memory

import curvlinops

TEST = Path(__file__).parents[2] / "test"
#: Damping of inverses. Factors have largest eigenvalues near one, so it limits rounding errors.
DAMPING = 1e-2
#: The largest number of entries that are compared.
MOST = 10**6
#: The context in which an operator keeps graphs.
SCOPE = ExitStack()


def suite() -> ModuleType:
    """Return the test suite's problems, whose module has the same name as the benchmark's."""
    if "suite" not in sys.modules:
        sys.path.append(str(TEST))
        spec = importlib.util.spec_from_file_location("suite", TEST / "problems.py")
        sys.modules["suite"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["suite"])
    return sys.modules["suite"]


def make(name: str) -> Any:
    """Build a problem of the benchmark, or `test/NAME` of the test suite, in the latter's class."""
    if name.startswith("test/"):
        return suite().make(name.removeprefix("test/"))
    model, X, y = problems.make(name, "cpu")
    params = list(model.parameters())
    return suite().Problem(model, nn.CrossEntropyLoss(), params, [(X, y)], mc=True)


class Row(NamedTuple):
    """How to build what is asked, and the question."""

    build: Callable[[], Any]
    ask: Callable[[Any], Any]


def rows(p: Any) -> dict[str, Row]:
    """Return all quantities of a problem by name."""
    found = {}
    dtype = reduce(torch.promote_types, precisions(p))

    def operator(kind: str, **options: Any) -> Callable[..., Any]:
        options["batch_size_fn"] = p.batch_size_fn
        with_loss = "Jacobian" not in kind
        arguments = (p.model, p.loss) if with_loss else (p.model,)
        options |= {"reduction": p.reduction} if with_loss else {}
        # a version that lacks the name refuses the row
        return lambda **more: getattr(curvlinops, kind)(
            *arguments, p.params, p.data, **options, **more
        )

    def product(A: Any, *columns: int) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return A @ torch.randn(A.shape[1], *columns, generator=generator, dtype=dtype)

    operators = {
        "Hessian": operator("HessianLinearOperator"),
        "GGN": operator("GGNLinearOperator"),
        "sampled Fisher": operator("FisherMCLinearOperator"),
        "empirical Fisher": operator("EFLinearOperator"),
        "empirical Fisher by sample": operator("EFLinearOperator", terms="sample"),
        "Jacobian": operator("JacobianLinearOperator"),
        "transposed Jacobian": operator("TransposedJacobianLinearOperator"),
        "gradients": operator("PerSampleGradientLinearOperator"),
    }
    for name, build in operators.items():
        found[f"{name}: product"] = Row(lambda b=build: b(cache="none"), product)
        found[f"{name}: 4 columns"] = Row(lambda b=build: b(cache="none"), lambda A: product(A, 4))
        found[f"{name}: kept product"] = Row(lambda b=build: _linearized(b(), product), product)
    found |= _algorithms(operators["GGN"])
    found["gradients: transposed product"] = Row(build, lambda A: product(A.T))
    for method in ("dense", "norms", "gram", "second_moment"):
        found[f"gradients: {method}"] = Row(build, lambda A, m=method: getattr(A, m)())
    # exact quantities backpropagate one vector for each logit of a sample
    exact = bool(p.name) or p.data[0][1][0].numel() < 20
    for samples in (0, 1) if exact else (1,):
        build = operator("GGNDiagonalLinearOperator", mc_samples=samples)
        name = "sampled GGN diagonal" if samples else "GGN diagonal"
        found[f"{name}: diagonal"] = Row(build, lambda A: A.diagonal())
        found[f"{name}: trace"] = Row(build, lambda A: A.trace())
    for kind in ("KFAC", "EKFAC"):
        for fisher in ("mc", "type-2", "empirical") if exact else ("mc", "empirical"):
            for approx in ("expand", "reduce"):
                options = {"fisher_type": fisher, "kfac_approx": approx, "fallback": "dense"}
                build = operator(f"{kind}LinearOperator", **options)
                quantities = _factored(f"{kind} {fisher} {approx}", build, product)
                # all numbers but the trace depend on the arbitrary bases of null spaces
                few = (kind, approx) == ("EKFAC", "reduce")
                found |= islice(quantities.items(), 1 if few else None)
    return found


def _linearized(A: Any, product: Callable) -> Any:
    """Return an operator that keeps graphs, after the products that build them."""
    SCOPE.close()  # of the operator before
    if hasattr(A, "linearized"):
        SCOPE.enter_context(A.linearized())
    product(A)
    product(A)
    return A


def _algorithms(build: Callable[[], Any]) -> dict[str, Row]:
    """Return what solvers and estimators compute from products with a GGN."""

    def solve(A: Any) -> Tensor:
        b = torch.ones(A.shape[0], dtype=A.torch_dtype)
        return curvlinops.CGInverseLinearOperator(A.damped(0.1), rtol=1e-6) @ b

    return {
        "GGN: eigenpairs": Row(
            build, lambda A: curvlinops.eigsh(A, 3, "LA", tol=1e-8, seed=0).eigenvalues
        ),
        "GGN: CG": Row(build, solve),
        "GGN: Hutchinson": Row(build, lambda A: curvlinops.hutchinson_trace(A, 20, seed=0)),
        "GGN: XTrace": Row(build, lambda A: curvlinops.xtrace(A, 20, seed=0)),
        "GGN: density": Row(
            build, lambda A: list(curvlinops.lanczos_approximate_spectrum(A, 15, seed=0))
        ),
    }


def _factored(name: str, build: Callable[[], Any], product: Callable) -> dict[str, Row]:
    def factors(K: Any) -> list:
        K.compute_kronecker_factors()
        # mappings, but not always dictionaries
        return [dict(K.input_covariances), dict(K.gradient_covariances), K.trace()]

    def inverse(K: Any) -> list:
        damped = K.inverse(damping=DAMPING)
        return [product(damped), damped.logdet()]

    kept = cache(build)  # these rows do not compute the factors
    return {
        f"{name}: factors": Row(build, factors),
        f"{name}: product": Row(kept, lambda K: [product(K), K.diagonal()]),
        f"{name}: inverse": Row(kept, inverse),
        f"{name}: logdet": Row(kept, lambda K: K.logdet()),
    }


def numbers(result: Any) -> dict[str, Tensor]:
    """Return the tensors of a result by their paths, and some entries of large ones."""
    found = {}
    for path, leaf in tree_flatten_with_path(result)[0]:
        flat = torch.as_tensor(leaf).detach().flatten()
        if len(flat) > MOST:
            generator = torch.Generator().manual_seed(0)
            flat = flat[torch.randint(len(flat), (MOST,), generator=generator)]
        found[keystr(path)] = flat.clone()
    return found


class ForwardPasses:
    """Counts the calls of a model, without hooks, which would be a part of the model."""

    def __init__(self, model: Callable):
        self.count = 0
        self._module = model if isinstance(model, nn.Module) else None
        self._code = (type(model).forward if self._module else model).__code__

    def __enter__(self) -> "ForwardPasses":
        sys.setprofile(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _called(self, frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and frame.f_code is self._code:
            self.count += self._module is None or frame.f_locals["self"] is self._module


def look(row: Row, model: Callable, path: Path, small: bool) -> dict:
    """Write the numbers of two calls; return forward passes, and memory unless it is small."""
    call, results, passes = calls(row), [], []
    for _ in range(2):
        with ForwardPasses(model) as forward:
            results.append(call())
        passes.append(forward.count)
    torch.save(numbers(results), path)
    del results
    return {"passes": passes, "bytes": 0 if small else peak_memory(calls(row), "cpu")}


def calls(row: Row) -> Callable[[], Any]:
    """Return a function that builds and asks at its first call, and only asks later."""
    built = cache(row.build)
    return lambda: row.ask(built())


def precisions(p: Any) -> list[torch.dtype]:
    """Return the precisions of the parameters."""
    return [value.dtype for value in p.named_params().values()]


def main() -> None:
    """Answer line by line."""
    warnings.simplefilter("ignore")
    path = Path(sys.argv[1])
    print(json.dumps(curvlinops.__file__), flush=True)
    for line in sys.stdin:
        command, _, name = line.strip().partition(" ")
        if command == "problem":
            p = make(name)
            table = rows(p)
            narrowest = min(precisions(p), key=lambda dtype: dtype.itemsize)
            answer = {"rows": list(table), "dtype": str(narrowest).removeprefix("torch.")}
        elif command == "look":
            try:
                answer = look(table[name], p.model, path, small=bool(p.name))
            except Exception as error:
                answer = {"refused": f"{type(error).__name__}: {error}".splitlines()[0]}
        else:
            call, answer = calls(table[name]), []
            for _ in range(2):
                before = time.process_time()
                call()
                answer.append(time.process_time() - before)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
