"""Sphinx extension: all arguments of operators, the gallery's order and links, breaks in tables."""

import inspect
import re
from collections.abc import Iterator
from enum import Enum
from itertools import pairwise
from typing import Any

from scipy.sparse.linalg import LinearOperator

import curvlinops

#: Pages of the gallery by topic: spectra and training, Kronecker factors and optimizers, Laplace
#: approximations, influence and kernels, language models, model merging and pruning.
READING_ORDER = (
    "digits_cnn",
    "spectral_density",
    "curvature_matrices",
    "eigenvalues_through_training",
    "sharpness_of_sgd",
    "resnet_training",
    "kfac",
    "kronecker_fits",
    "kfac_optimizer",
    "preconditioned_cg",
    "laplace",
    "influence",
    "attribution_quality",
    "intervals",
    "finite_differences",
    "tangent_kernel",
    "lora_gpt2",
    "influence_lora",
    "influence_sequences",
    "long_sequences",
    "model_merging",
    "pruning",
)
#: Sections of docstrings whose entries a class inherits.
INHERITED = ("Args:", "Attributes:", "Raises:")


def reading_order(file: str) -> int:
    """Return the place of a page in the gallery."""
    return READING_ORDER.index(file.removeprefix("plot_").removesuffix(".py"))


def signature(app: Any, what: str, name: str, obj: Any, *_: Any) -> tuple[str, None] | None:
    """Return the arguments of an operator. SciPy's base class hides them from Sphinx."""
    if what != "class" or not issubclass(obj, LinearOperator):
        return None
    parameters = list(inspect.signature(obj.__init__).parameters.values())[1:]
    plain = [
        p.replace(
            annotation=inspect.Parameter.empty,
            default=p.default.value if isinstance(p.default, Enum) else p.default,
        )
        for p in parameters
    ]
    return str(inspect.Signature(plain)), None


def sections(docstring: str) -> dict[str, list[str]]:
    """Return the lines of each section of a Google docstring; the text has an empty header."""
    header, found = "", {"": []}
    for line in inspect.cleandoc(docstring).splitlines():
        if re.fullmatch(r"[A-Z]\w+:", line):
            header = line
            found[header] = []
        else:
            found[header].append(line)
    return found


def entries(lines: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield the name and the lines of each entry of a section."""
    starts = [i for i, line in enumerate(lines) if re.match(r" {4}\S", line)]
    for start, stop in pairwise([*starts, len(lines)]):
        yield lines[start].split(":")[0].strip().lstrip("*"), lines[start:stop]


def documented(cls: type) -> list[str]:
    """Return the docstrings of an operator, of its bases, and of the class that it refers to."""
    classes = [c for c in cls.__mro__ if c.__module__.startswith("curvlinops.")]
    if refers := re.search(r"For arguments and errors see ``(\w+)``", cls.__doc__ or ""):
        classes += [c for c in getattr(curvlinops, refers[1], object).__mro__ if c not in classes]
    return [vars(c).get("__doc__") or "" for c in classes]


def inherit_entries(app: Any, what: str, name: str, obj: Any, _: Any, lines: list[str]) -> None:
    """Complete the docstring of an operator by arguments, attributes and errors of its bases."""
    if what != "class" or not issubclass(obj, LinearOperator):
        return
    accepted = list(inspect.signature(obj.__init__).parameters)
    own, *inherited = [sections(docstring) for docstring in documented(obj)]
    for header in INHERITED:
        found = list(entries(own.get(header, [])))
        for base in inherited:
            names = [entry for entry, _ in found]
            found += [e for e in entries(base.get(header, [])) if e[0] not in names]
        if header == "Args:":
            found = [entry for entry in found if entry[0] in accepted]
            found.sort(key=lambda entry: accepted.index(entry[0]))
        if found:
            own[header] = [line for _, text in found for line in text]
    lines[:] = [line for header, more in own.items() for line in ("", header, *more)]


def link_gallery(app: Any, page: str, source: list[str]) -> None:
    """Replace links to the examples' files, which work in the repository, by links to the site."""
    examples = r"\(\.\./docs_src/examples/"
    source[0] = re.sub(rf"{examples}(plot_\w+)\.py\)", r"(gallery-generated/\1)", source[0])
    source[0] = re.sub(rf"{examples}README\.rst\)", "(gallery-generated/index)", source[0])


def break_calls(app: Any, page: str, template: str, context: dict[str, Any], *_: Any) -> None:
    """Let calls in tables break after brackets, ``=`` and words with a dot: tables fit the page."""

    def with_breaks(code: re.Match[str]) -> str:
        # Sphinx puts words of code into spans, in which nothing breaks
        split = '</span><wbr><span class="pre">'
        return re.sub(r"(?<=[(=])(?=[^)=])|(?<=[\w()]{4}\.)(?=\w)", split, code[0])

    parts = re.split(r"(<table.*?</table>)", context.get("body", ""), flags=re.DOTALL)
    parts[1::2] = [re.sub(r'(?<=<span class="pre">)[^<]+', with_breaks, x) for x in parts[1::2]]
    context["body"] = "".join(parts)


def setup(app: Any) -> None:
    """Connect the functions of this file."""
    app.connect("source-read", link_gallery)
    app.connect("html-page-context", break_calls)
    app.connect("autodoc-process-signature", signature)
    # napoleon reads docstrings at the priority 500
    app.connect("autodoc-process-docstring", inherit_entries, priority=400)
