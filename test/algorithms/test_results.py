"""Results as plain dictionaries, and in files."""

import json
from collections import OrderedDict

import matrices
import numpy as np
import pytest
import torch

from curvlinops import (
    CGInverseLinearOperator,
    IdentityLinearOperator,
    LSMRInverseLinearOperator,
    ParameterSpace,
    certified_scores,
    eigsh,
    hutchinson_diag,
    lanczos_approximate_spectrum,
    quadratic_form,
    to_plain,
)

A = torch.from_numpy(matrices.large("positive"))[:20, :20].contiguous()
SPACE = ParameterSpace({"": (20,)}, torch.float64)
RESULTS = {
    "eigenpairs": lambda: eigsh(A, 3, seed=0),
    "estimate": lambda: hutchinson_diag(A, 5, return_error=True, seed=0),
    "density": lambda: lanczos_approximate_spectrum(
        A, 4, num_points=8, num_repeats=2, return_error=True, seed=0
    ),
    "interval": lambda: quadratic_form(A, A[0], 1.0),
    "scores": lambda: certified_scores(A, A[0], A, IdentityLinearOperator(SPACE), 1.0, top=3),
    "solution": lambda: CGInverseLinearOperator(A).solve(A[0]),
    "least squares": lambda: LSMRInverseLinearOperator(A).matvec_with_info(A[0]),
}


@pytest.mark.parametrize("name", RESULTS)
def test_files(name: str, tmp_path):
    result = RESULTS[name]()
    torch.save({"step": 3, "result": result}, tmp_path / "result.pt")
    found = torch.load(tmp_path / "result.pt", weights_only=True)["result"]
    assert type(found) is type(result)
    assert to_plain(found, skip=()) == to_plain(result, skip=())


@pytest.mark.parametrize("name", RESULTS)
def test_json(name: str):
    result = RESULTS[name]()
    plain = json.loads(json.dumps(to_plain(result)))
    fields = {
        n: getattr(result, n) for n in dir(result) if isinstance(getattr(result, n), torch.Tensor)
    }
    large = {"eigenvectors", "x"}
    assert fields and fields.keys() - large == plain.keys() - {"num_products", "is_decided"}
    for field in fields.keys() - large:
        np.testing.assert_array_equal(plain[field], fields[field])
    assert large & fields.keys() <= to_plain(result, skip=()).keys()


def test_any_nesting():
    nested = OrderedDict(x=(torch.tensor(1.5), np.arange(2)), flag=True, none=None, name="a")
    assert to_plain(nested) == {"x": [1.5, [0, 1]], "flag": True, "none": None, "name": "a"}
    assert to_plain(np.float32(0.5)) == 0.5 and to_plain(torch.eye(2)) == [[1, 0], [0, 1]]
    pairs = eigsh(A, 1, seed=0)
    assert to_plain([pairs], skip="history")[0].keys() == {
        *("eigenvalues", "eigenvectors", "num_products", "residuals")
    }
    with pytest.raises(TypeError, match="A Generator has no plain form"):
        to_plain({"a": torch.Generator()})
