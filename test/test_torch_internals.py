"""Private handles of PyTorch: a version that lacks one can still import the package."""

import subprocess
import sys

import pytest

#: What is private in PyTorch and read at import, and what a product does without it.
HANDLES = {
    "torch._grouped_mm": "works",
    "torch._weight_norm": "works",
    "torch._C.DispatchKey": "works",
    "torch.autograd.graph._engine_run_backward": "is refused",
    "torch.nn.modules.batchnorm._NormBase": "works",
    "torch.overrides._get_current_function_mode_stack": "works",
    "torch.overrides._pop_mode_temporarily": "works",
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack": "works",
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass": "works",
}

WITHOUT = """
import functools, sys
import torch

path = sys.argv[1]
*place, name = path.split(".")[1:]
owner = functools.reduce(getattr, place, torch)
handle = getattr(owner, name)
delattr(owner, name)
import curvlinops
setattr(owner, name, handle)  # PyTorch itself may need it

model = torch.nn.Linear(2, 1)
data, params = [(torch.ones(3, 2), torch.ones(3, 1))], list(model.parameters())
try:
    for _ in range(3):
        curvlinops.HessianLinearOperator(model, torch.nn.MSELoss(), params, data) @ torch.ones(3)
    print("works")
except RuntimeError as error:
    print("is refused" if path in str(error) and torch.__version__ in str(error) else error)
"""


@pytest.mark.parametrize("path", HANDLES)
def test_versions_without_a_private_handle(path: str):
    command = [sys.executable, "-c", WITHOUT, path]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.stdout.strip() == HANDLES[path], found.stderr
