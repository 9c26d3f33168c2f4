"""Private handles of PyTorch do what is expected; products need few of those read at import."""

import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

from curvlinops.support import torch_internals

#: Private handles of PyTorch without which products work.
HANDLES = [
    "torch._grouped_mm",
    "torch._weight_norm",
    "torch._C.DispatchKey",
    "torch.nn.modules.batchnorm._NormBase",
    "torch.overrides._get_current_function_mode_stack",
    "torch.overrides._pop_mode_temporarily",
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass",
]

#: Each handle is taken away from a process of its own, which has imported PyTorch already.
WITHOUT = """
import functools, os, sys
import torch

def multiply_without(path):
    *place, name = path.split(".")[1:]
    owner = functools.reduce(getattr, place, torch)
    handle = getattr(owner, name)
    delattr(owner, name)
    import curvlinops
    setattr(owner, name, handle)  # PyTorch itself may need it

    model = torch.nn.Linear(2, 1)
    data, params = [(torch.ones(3, 2), torch.ones(3, 1))], list(model.parameters())
    for _ in range(3):
        H = curvlinops.HessianLinearOperator(model, torch.nn.MSELoss(), params, data)
        H @ torch.ones(3)

for path in sys.argv[1:]:
    if os.fork() == 0:
        multiply_without(path)
        print(path, flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.extensive
def test_versions_without_a_private_handle():
    command = [sys.executable, "-c", WITHOUT, *HANDLES]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.stdout.splitlines() == HANDLES, found.stderr


def test_modules():
    inner = nn.Linear(1, 1)
    outer = nn.Sequential(inner, nn.Sequential(inner, nn.BatchNorm1d(1)))
    assert torch_internals.modules_of([outer, inner]) == list(outer.modules())
    parameters, buffers = torch_internals.tensor_tables(outer[1][1])
    assert [*parameters, *buffers] == list(outer[1][1].state_dict())
    with warnings.catch_warnings():  # PyTorch's own, at its first import of the compiler
        warnings.simplefilter("ignore")
        compiled = torch.compile(outer)
    assert torch_internals.original_module(compiled) is outer
    assert torch_internals.original_module(outer) is outer


def test_hooks_of_modules():
    module = nn.Linear(1, 1)
    assert not any(torch_internals.forward_hooks(module))
    module.register_full_backward_hook(lambda *args: None)
    module.register_full_backward_pre_hook(lambda *args: None)
    assert [len(hooks) for hooks in torch_internals.backward_hooks(module)] == [1, 1]
    for register in (module.register_forward_hook, module.register_forward_pre_hook):
        handle = register(lambda *args: None)
        assert any(torch_internals.forward_hooks(module))
        handle.remove()


def test_attributes_of_tensors():
    x = torch.zeros(2)
    before = torch_internals.version_of(x)
    assert torch_internals.version_of(x.add_(1)) == before + 1
    with torch.inference_mode():
        assert torch_internals.version_of(torch.zeros(1)) is None
    y = torch_internals.with_attributes(x.clone(), nn.Parameter(x))
    assert isinstance(y, nn.Parameter)


def test_strided_tensors():
    dense = torch.eye(2)
    assert torch_internals.strided_tensors(dense)[0] is dense
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CS. tensor support is in beta")
        sparse = dense.to_sparse(), dense.to_sparse_csr(), dense.to_sparse_csc()
    for x in sparse:
        parts = torch_internals.strided_tensors(x)
        assert all(part.layout is torch.strided for part in parts)
        assert torch.equal(parts[-1], torch.ones(2))


#: Products in forward mode, in a process of its own in which warnings are errors.
PRODUCTS = """
import sys, torch, curvlinops
assert "torch._decomp.decompositions_for_jvp" not in sys.modules  # the import takes 0.1 s
model, data = torch.nn.Linear(2, 2), [(torch.ones(3, 2), torch.ones(3, 2))]
G = curvlinops.GGNLinearOperator(model, torch.nn.MSELoss(), list(model.parameters()), data)
G @ torch.ones(6)
curvlinops.eigsh(G, 1)
assert "torch._decomp.decompositions_for_jvp" in sys.modules
assert "torch._dynamo" not in sys.modules  # the compiler
double = lambda x: 2 * x
function = lambda x: torch.cond(x.sum() > 0, lambda x: x @ model.weight, double, (x,))
H = curvlinops.HessianLinearOperator(function, torch.nn.MSELoss(), [model.weight], data)
torch.testing.assert_close(H @ torch.ones(4), torch.full((4,), 2.0))
assert "torch._dynamo" in sys.modules and torch.compile.__module__ == "torch"
"""


@pytest.mark.extensive
def test_products_import_without_warnings_what_they_use():
    subprocess.run([sys.executable, "-W", "error", "-c", PRODUCTS], check=True)


def test_uncached_parametrizations():
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    with nn.utils.parametrize.cached():
        first = layer.weight
        with torch_internals.uncached_parametrizations():
            assert layer.weight is not first
        assert layer.weight is first
