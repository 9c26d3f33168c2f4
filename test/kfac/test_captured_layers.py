"""Inputs and output gradients of layers give the exact blocks of the GGN."""

import pytest
import torch
from contract import error
from torch import Tensor, nn

from curvlinops import GGNLinearOperator, KFACLinearOperator
from curvlinops.operators.kfac.captured import CapturedLayer


class Text(nn.Module):
    """An embedding, a layer with tokens, and a grouped convolution over them."""

    def __init__(self):
        super().__init__()
        self.table, self.layer = nn.Embedding(7, 4, padding_idx=0), nn.Linear(4, 4)
        self.conv, self.head = nn.Conv1d(4, 6, 2, groups=2), nn.Linear(6, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.layer(self.table(x))).mT
        return self.head(torch.tanh(self.conv(h)).mean(2))


def problem(reduction: str) -> tuple:
    torch.manual_seed(0)
    model, loss = Text().double(), nn.CrossEntropyLoss(reduction=reduction)
    data = [(torch.randint(7, (n, 5)), torch.randint(3, (n,))) for n in (4, 3)]
    return model, loss, dict(model.named_parameters()), data


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_blocks(reduction: str):
    model, loss, params, data = problem(reduction)
    blocks: dict[str, Tensor] = {}

    def add(layer: CapturedLayer) -> None:
        x, g = layer.inputs, layer.gradients
        if x.ndim == 3:  # one group
            x, g = x.unsqueeze(2), g.unsqueeze(3)
        rows = torch.einsum("vnsgo,nsgi->vngoi", g, x)
        if layer.weight == "table.weight":
            rows = rows.mT
        rows = rows.flatten(2).flatten(0, 1)
        blocks[layer.weight] = blocks.get(layer.weight, 0) + rows.T @ rows
        if layer.bias is not None:
            rows = g.sum(2).flatten(2).flatten(0, 1)
            blocks[layer.bias] = blocks.get(layer.bias, 0) + rows.T @ rows

    K = KFACLinearOperator(model, loss, params, data, fisher_type="type-2")
    c = K.visit_layers(add)
    assert blocks.keys() == params.keys()
    G = GGNLinearOperator(model, loss, params, data)
    dense = G.to_dense()
    for name, block in blocks.items():
        place = G.space.slice(name)
        assert error(c * block, dense[place, place]) <= 1e-10, name


def test_vectors_of_chunks():
    """Several chunks of vectors of a batch have the same inputs."""
    model, loss, params, data = problem("sum")
    options = {"fisher_type": "mc", "mc_samples": 5}
    layers: list[CapturedLayer] = []
    K = KFACLinearOperator(model, loss, params, data, **options)
    assert K.visit_layers(layers.append) == 1.0
    assert {layer.batch for layer in layers} == {0, 1}
    B = sum(
        torch.einsum("vnso,vnsp->op", layer.gradients, layer.gradients)
        for layer in layers
        if layer.weight == "layer.weight"
    )
    assert error(B, K.gradient_covariances["layer"]) <= 1e-10
