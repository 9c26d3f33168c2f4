"""Write the notebooks of this folder from pages of the gallery, with their outputs.

Run ``make notebooks``, or ``python docs_src/notebooks/make.py [NAME ...]`` for some of them.
"""

import os
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from sphinx_gallery.gen_gallery import DEFAULT_GALLERY_CONF
from sphinx_gallery.notebook import jupyter_notebook
from sphinx_gallery.py_source_parser import split_code_and_text_blocks

FOLDER = Path(__file__).parent
EXAMPLES = FOLDER.parent / "examples"
#: The pages that have notebooks.
NAMES = [
    "spectral_density",
    "eigenvalues_through_training",
    "kfac",
    "kronecker_fits",
    "kfac_optimizer",
    "laplace",
    "intervals",
    "finite_differences",
    "influence",
    "influence_lora",
    "influence_sequences",
    "tangent_kernel",
    "lora_gpt2",
    "long_sequences",
    "resnet_training",
    "attribution_quality",
    "pruning",
]


def convert(name: str) -> nbformat.NotebookNode:
    """Return a page of the gallery as a notebook without outputs."""
    _, blocks = split_code_and_text_blocks(EXAMPLES / f"plot_{name}.py")
    contents = jupyter_notebook(blocks, dict(DEFAULT_GALLERY_CONF), str(EXAMPLES))
    notebook = nbformat.from_dict(contents)
    for number, cell in enumerate(notebook.cells):
        cell["id"], cell.source = f"cell-{number}", "".join(cell.source)
    notebook.nbformat_minor = 5
    return notebook


def execute(notebook: nbformat.NotebookNode) -> None:
    """Run a notebook in an empty folder, in which it may write its figures."""
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(
            notebook, timeout=1800, resources={"metadata": {"path": folder}}, kernel_name="python3"
        ).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times differ from run to run
        if cell.cell_type == "code":  # warnings have paths of this machine
            cell.outputs = [out for out in cell.outputs if out.get("name") != "stderr"]


def main(names: list[str]) -> None:
    """Write notebooks."""
    os.environ |= {"TQDM_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    # the backend of notebooks, whose resolution keeps the files small
    os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"
    for name in names or NAMES:
        notebook = convert(name)
        execute(notebook)
        path = FOLDER / f"{name}.ipynb"
        nbformat.write(notebook, path)
        print(f"{path.name}: {path.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    main(sys.argv[1:])
