"""Averages over inputs leave padding out, against samples alone without padding."""

import logging
import warnings
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import kfac_reference
import pytest
import torch
import torch.nn.functional as F
from contract import error, matrix
from problems import Problem
from tables import core, in_turns
from torch import Tensor, nn

from curvlinops import EKFACLinearOperator, KFACLinearOperator
from curvlinops.layers import samples

N, D, CLASSES = 4, 3, 3
IGNORED = -100


@pytest.fixture(autouse=True)
def _seed(caplog):
    caplog.set_level(logging.ERROR, "curvlinops")
    torch.manual_seed(0)


class EncoderDecoder(nn.Module):
    """A source and a target, which has tokens, and is read by a grouped convolution, too."""

    def __init__(self, adapted: bool = False):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(D, D), nn.Linear(D, D)
        self.filters, self.head = nn.Conv1d(D, D, 1, groups=D), nn.Linear(D, CLASSES)
        self.table = nn.Embedding(CLASSES, D)
        self.adapted = adapted
        if adapted:
            self.up = nn.Linear(D, D, bias=False)

    def forward(self, X: Mapping[str, Tensor]) -> Tensor:
        real = X["source mask"].unsqueeze(-1)
        e = torch.tanh(self.encoder(X["source"]))
        e = torch.tanh(self.up(e)) if self.adapted else e
        e = (e * real).sum(1) / real.sum(1).clamp(min=1)
        d = torch.tanh(self.decoder(X["target"]) + self.table(X["target ids"]) + e.unsqueeze(1))
        d = torch.tanh(self.filters(d.mT)).mT
        return self.head(d).mT

    def attention_masks(self, X: Mapping[str, Tensor]) -> list[Tensor]:
        return [X["source mask"], X["target mask"]]


def sample(source: int, target: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return a sample of some lengths, without padding, and its labels."""
    X = {"source": torch.randn(1, source, D), "target": torch.randn(1, target, D)}
    X = {name: x.double() for name, x in X.items()}
    X |= {f"{name} mask": torch.ones(1, x.shape[1]).double() for name, x in X.items()}
    X["target ids"] = torch.randint(CLASSES, (1, target))
    return X, torch.randint(CLASSES, (1, target))


def padded(parts: list[tuple[dict[str, Tensor], Tensor]], source: int, target: int) -> tuple:
    """Return samples as a batch of sequences of these lengths; padding is no zero."""

    def pad(name: str, x: Tensor) -> Tensor:
        missing = (source if "source" in name else target) - x.shape[1]
        return F.pad(x, (0, missing) if x.ndim == 2 else (0, 0, 0, missing), value=_pad(name))

    X = {name: torch.cat([pad(name, x[name]) for x, _ in parts]) for name in parts[0][0]}
    y = [F.pad(y, (0, target - y.shape[1]), value=IGNORED) for _, y in parts]
    return X, torch.cat(y)


def _pad(name: str) -> float:
    return 0.0 if "mask" in name else 1.0 if "ids" in name else 7.0


#: Lengths of sources and targets of the samples in batches, and the lengths with padding.
LENGTHS: dict[str, list[tuple[list[tuple[int, int]], tuple[int, int]]]] = {
    "sources longer": [([(6, 2), (5, 4), (3, 1)], (6, 6)), ([(4, 4), (2, 1)], (4, 4))],
    "targets longer": [([(2, 6), (4, 5), (1, 3)], (6, 6)), ([(1, 4), (4, 4)], (4, 4))],
    "some longer": [([(2, 6), (6, 1), (1, 3)], (6, 6)), ([(4, 2), (1, 4)], (4, 4))],
    "full sources": [([(5, 2), (5, 4)], (5, 5)), ([(5, 1)], (5, 5))],
    "other lengths": [([(6, 2), (5, 4), (3, 1)], (6, 5)), ([(4, 4), (2, 1)], (4, 5))],
    "no padding": [([(3, 3), (3, 3)], (3, 3)), ([(4, 4)], (4, 4))],
}


def of_lengths(name: str, model: nn.Module) -> tuple[Problem, Problem]:
    """Return the same problem with padding, and with samples alone."""
    batches = [([sample(*one) for one in lengths], to) for lengths, to in LENGTHS[name]]
    p = Problem(
        model.double(),
        nn.CrossEntropyLoss(),
        list(model.parameters()),
        [padded(parts, *to) for parts, to in batches],
        mc=True,
        batch_size_fn=lambda X: len(X["source"]),
    )
    return p, replace(p, data=[one for parts, _ in batches for one in parts])


def build(p: Problem, cls: type = KFACLinearOperator, **options: Any) -> KFACLinearOperator:
    options["exact"] = options["fisher_type"] == "type-2"
    return p.build(cls, **options)


@pytest.mark.parametrize(
    "lengths, fisher_type",
    core(
        [*in_turns(LENGTHS, ["type-2", "empirical"]), *product(LENGTHS, ["forward-only"])],
        product(LENGTHS, ["empirical", "type-2"]),
    ),
)
def test_two_sequences_of_a_sample(lengths: str, fisher_type: str, monkeypatch):
    """Also if they are padded to one length, and however many vectors fit into the memory."""
    p, alone = of_lengths(lengths, EncoderDecoder())
    if fisher_type == "forward-only" and lengths not in ("other lengths", "no padding"):
        with pytest.raises(NotImplementedError, match=r"Two masks .*different"):
            build(p, fisher_type=fisher_type).trace()
        return
    for reduce, joint, size in ((False, False, 1), (True, True, 1), (True, False, 2**20)):
        monkeypatch.setattr(samples, "BYTES", size)
        options = {"kfac_approx": "reduce" if reduce else "expand"}
        options |= {"separate_weight_and_bias": not joint, "fisher_type": fisher_type}
        expected = kfac_reference.kfac(alone, fisher_type, reduce=reduce, joint=joint)
        assert error(matrix(build(p, **options)), expected) <= 1e-10, options
    if fisher_type != "forward-only":
        expected = kfac_reference.kfac(alone, fisher_type, corrected=True)
        found = build(p, EKFACLinearOperator, fisher_type=fisher_type)
        assert error(matrix(found), expected) <= 1e-10


@pytest.mark.parametrize("seed", [0, 1])
def test_masks_with_sampled_vectors(seed: int):
    p, alone = of_lengths("some longer", EncoderDecoder(adapted=True))
    K = build(p, fisher_type="mc", seed=seed)
    inputs = {"encoder": "source", "decoder": "target"}
    for layer, name in inputs.items():
        x = torch.cat([X[name][0] for X, _ in alone.data])
        assert error(K.input_covariances[layer], x.T @ x / len(x)) <= 1e-12


class TwoOutputs(nn.Module):
    """The second output depends on padding, too."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(D, 2)

    def forward(self, X: Mapping[str, Tensor]) -> Tensor:
        z, real = self.layer(X["x"]), X["mask"].unsqueeze(-1)
        return torch.cat([(z[..., :1] * real).sum(1), z[..., 1:].sum(1)], 1)

    def attention_masks(self, X: Mapping[str, Tensor]) -> list[Tensor]:
        return [X["mask"]]


@pytest.mark.parametrize("cls", [KFACLinearOperator, EKFACLinearOperator])
def test_padding_that_some_outputs_depend_on(cls: type, monkeypatch: pytest.MonkeyPatch):
    """It counts, whichever outputs are backpropagated first."""
    X = {"x": torch.randn(N, 5, D).double(), "mask": torch.ones(N, 5).double()}
    X["mask"][:, 2:] = 0
    model = TwoOutputs().double()
    p = Problem.of(model, nn.MSELoss(), [(X, torch.randn(N, 2))])
    p = replace(p, batch_size_fn=lambda X: len(X["x"]))
    corrected = cls is EKFACLinearOperator
    expected = kfac_reference.kfac(p, "type-2", corrected=corrected)
    for size in (samples.BYTES, 1):
        monkeypatch.setattr(samples, "BYTES", size)
        assert error(matrix(build(p, cls, fisher_type="type-2")), expected) <= 1e-10


def test_masks_that_nothing_tells_apart():
    """The gradient of the encoder is zero, and its sequences might be the targets."""
    model = EncoderDecoder(adapted=True)
    nn.init.zeros_(model.up.weight)
    p, alone = of_lengths("sources longer", model)
    with pytest.raises(NotImplementedError, match=r"Two masks .* 'encoder.weight'.*different"):
        build(p, fisher_type="empirical").trace()
    p, alone = of_lengths("other lengths", model)
    expected = kfac_reference.kfac(alone, "empirical")
    assert error(matrix(build(p, fisher_type="empirical")), expected) <= 1e-10


def test_batches_without_terms():
    """The inputs count, with a warning; masked inputs do not."""
    p, alone = of_lengths("other lengths", EncoderDecoder(adapted=True))
    (X, y), *rest = p.data
    ignored = X, torch.full_like(y, IGNORED)
    options = {"fisher_type": "empirical"}
    with pytest.warns(UserWarning, match="Batch 1 has no term of the loss.*attention_masks"):
        build(replace(p, data=[*rest, ignored]), **options).trace()
    masked = X | {name: 0 * x for name, x in X.items() if "mask" in name}
    found = build(replace(p, data=[*p.data, (masked, ignored[1])]), **options)
    with warnings.catch_warnings(action="error"):
        assert error(matrix(found), kfac_reference.kfac(alone, "empirical")) <= 1e-10


class Experts(nn.Module):
    """Two experts, which get their tokens in an order of their own."""

    def __init__(self):
        super().__init__()
        self.first, self.experts = nn.Linear(D, D), nn.ModuleList(nn.Linear(D, D) for _ in range(2))

    def forward(self, X: Mapping[str, Tensor]) -> Tensor:
        tokens = torch.tanh(self.first(X["x"])).flatten(0, 1)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            chosen = (X["expert"].flatten() == number).nonzero().squeeze(1).flip(0)
            out = out.index_put((chosen,), expert(tokens[chosen]))
        return out.view_as(X["x"]).mT

    def attention_masks(self, X: Mapping[str, Tensor]) -> list[Tensor]:
        return [X["mask"]]


def test_rows_of_experts_are_not_those_of_a_mask():
    """Also where an expert gets all tokens of the only sequence of a batch."""
    x, expert = torch.randn(2, 5, D).double(), torch.tensor([[1] * 5, [0, 1, 0, 1, 0]])
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    y = torch.randint(CLASSES, (2, 5)).masked_fill(mask == 0, IGNORED)
    y[0, 0] = IGNORED  # a prompt
    X, model = {"x": x, "expert": expert, "mask": mask}, Experts().double()
    options = {"fisher_type": "type-2", "batch_size_fn": lambda X: len(X["x"])}
    arguments = model, nn.CrossEntropyLoss(), dict(model.named_parameters())
    apart = [({name: t[i : i + 1] for name, t in X.items()}, y[i : i + 1]) for i in range(2)]
    A, B = (
        KFACLinearOperator(*arguments, data, **options).input_covariances
        for data in (apart, [(X, y)])
    )
    assert A.keys() == B.keys() == {"first", "experts.0", "experts.1"}
    for name in A:
        assert error(A[name], B[name]) <= 1e-12
