"""Configuration of the site; `make docs` builds it, with warnings as errors."""

import importlib.metadata
import logging
import os
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

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
    "sphinx-mathjax-offline",  # pages refer to nothing outside of the site
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
    "site_extension",
]
exclude_patterns = ["_build"]

# -- pages
myst_enable_extensions = [
    "amsmath",
    "attrs_block",
    "colon_fence",
    "deflist",
    "dollarmath",
    "tasklist",
]
myst_heading_anchors = 3

# -- API reference
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
# The contents of a page are its headings, one for each class.
toc_object_entries = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False
# Attributes of named tuples are members already; as a list they are not described twice.
napoleon_use_ivar = True

# -- gallery
sphinx_gallery_conf = {
    "examples_dirs": "../docs_src/examples",
    "gallery_dirs": "gallery-generated",
    "filename_pattern": r"/plot_",
    "within_subsection_order": "site_extension.reading_order",
    "thumbnail_size": (680, 400),
    "download_all_examples": False,
    "abort_on_example_error": True,
    "min_reported_time": 1e6,
    "write_computation_times": False,
}
# The examples draw without a display; sphinx-gallery collects the figures.
warnings.filterwarnings("ignore", message=".*FigureCanvasAgg is non-interactive.*")
# A dependency of the theme prints what every library logs.
logging.getLogger("curvlinops").setLevel(logging.WARNING)

# -- looks
html_theme = "furo"
html_title = f"curvlinops {release}"
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
