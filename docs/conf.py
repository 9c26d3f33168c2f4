"""Configuration of the site; `make docs` builds it, with warnings as errors."""

import importlib.metadata
import inspect
import os
import warnings
from enum import Enum
from typing import Any

from scipy.sparse.linalg import LinearOperator

# Progress bars are for terminals, not for pages.
os.environ["TQDM_DISABLE"] = "1"

project = "curvlinops"
author = "The curvlinops developers"
copyright = author
release = importlib.metadata.version("curvlinops")
version = release

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
]
exclude_patterns = ["_build"]

# -- pages
myst_enable_extensions = ["amsmath", "deflist", "dollarmath", "tasklist"]
myst_heading_anchors = 3

# -- API reference
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
# Attributes of named tuples are members already; as a list they are not described twice.
napoleon_use_ivar = True

# -- gallery
sphinx_gallery_conf = {
    "examples_dirs": "../docs_src/examples",
    "gallery_dirs": "gallery-generated",
    "filename_pattern": r"/plot_",
    "download_all_examples": False,
    "abort_on_example_error": True,
    "min_reported_time": 1e6,
    "write_computation_times": False,
}
# The examples draw without a display; sphinx-gallery collects the figures.
warnings.filterwarnings("ignore", message=".*FigureCanvasAgg is non-interactive.*")

# -- looks
html_theme = "furo"
html_title = f"curvlinops {release}"
html_copy_source = False


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


def setup(app: Any) -> None:
    """Connect the functions of this file."""
    app.connect("autodoc-process-signature", signature)
