"""Problems of Hugging Face's models have the models' own losses, and plain autograd's matrices."""

import ast
import copy
import inspect
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kfac_reference
import pytest
import reference
import torch
from models import Using
from problems import Problem
from tables import core
from torch import Tensor, nn
from torch.utils.data import DataLoader

from curvlinops import (
    EFLinearOperator,
    EKFACLinearOperator,
    GGNLinearOperator,
    HessianLinearOperator,
    KFACLinearOperator,
    PerSampleGradientLinearOperator,
    SubmatrixLinearOperator,
    by_layer,
    hutchinson_trace,
    select_parameters,
)
from curvlinops.autodiff import overrides
from curvlinops.integrations.transformers import problem

transformers = pytest.importorskip("transformers")
# some versions still call it at their import
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script")

V, C = 29, 3  # tokens and classes
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
#: What most configurations have.
BASE = {
    "vocab_size": V, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 16, "max_position_embeddings": 32, **TOKENS,
}  # fmt: skip
GPT = {"vocab_size": V, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 32, **TOKENS}
GROUPED = {**BASE, "num_key_value_heads": 1, "head_dim": 4}
BART = {"vocab_size": V, "d_model": 8, "max_position_embeddings": 32, **TOKENS}
BART |= {"decoder_start_token_id": 2}
BART |= {f"{side}_layers": 1 for side in ("encoder", "decoder")}
BART |= {f"{side}_attention_heads": 2 for side in ("encoder", "decoder")}
BART |= {f"{side}_ffn_dim": 16 for side in ("encoder", "decoder")}
T5 = {"vocab_size": V, "d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
T5 |= {"decoder_start_token_id": 0, "pad_token_id": 0}

#: Name of the configuration's class, and its arguments.
CONFIGS: dict[str, dict[str, Any]] = {
    "GPT2": GPT,
    "GPTNeo": {**BASE, "num_layers": 2, "num_heads": 2, "attention_types": [[["global"], 2]]},
    "GPTJ": {**GPT, "rotary_dim": 4},
    "GPTNeoX": BASE,
    "OPT": {**BASE, "ffn_dim": 16, "word_embed_proj_dim": 8},
    "Bloom": {"vocab_size": V, "hidden_size": 8, "n_layer": 2, "n_head": 2, **TOKENS},
    "Falcon": BASE,
    "Phi": BASE,
    "Llama": GROUPED,
    "Mistral": GROUPED,
    "Qwen2": GROUPED,
    "Qwen3": GROUPED,
    "Gemma": GROUPED,
    "Gemma2": GROUPED,
    "Bert": BASE,
    "Roberta": BASE,
    "DistilBert": {"vocab_size": V, "dim": 8, "n_layers": 2, "n_heads": 2, "hidden_dim": 16},
    "Electra": {**BASE, "embedding_size": 8},
    "Albert": {**BASE, "embedding_size": 8},
    "DebertaV2": {**BASE, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "ModernBert": BASE,
    "T5": T5,
    "Bart": BART,
    "Pegasus": BART,
}

#: Models whose loss is that of the next token.
SHIFTED = ["GPT2LMHeadModel", "LlamaForCausalLM"]
NO_DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
NO_DROPOUT |= dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
CAUSAL = ["GPT2", "GPTNeo", "GPTJ", "GPTNeoX", "OPT", "Bloom", "Falcon", "Phi", "Llama"]
CAUSAL += ["Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2"]
MASKED = ["Bert", "Roberta", "DistilBert", "Electra", "Albert", "DebertaV2", "ModernBert"]
CLASSES = [f"{name}{'LMHeadModel' if name == 'GPT2' else 'ForCausalLM'}" for name in CAUSAL]
CLASSES += [f"{name}ForMaskedLM" for name in MASKED]
CLASSES += [f"{name}ForConditionalGeneration" for name in ("T5", "Bart", "Pegasus")]
CLASSES += [f"{name}ForSequenceClassification" for name in ("Bert", "GPT2", "Llama", "DebertaV2")]
CLASSES += [f"{name}ForTokenClassification" for name in ("Bert", "DistilBert", "Electra", "Qwen2")]


#: One of each family of losses, and of each way to attend.
FEW = ["GPT2LMHeadModel", "LlamaForCausalLM", "BertForMaskedLM", "DebertaV2ForMaskedLM"]
FEW += ["T5ForConditionalGeneration", "BartForConditionalGeneration"]
FEW += ["GPT2ForSequenceClassification", "BertForTokenClassification"]


def make(name: str, **options: Any) -> nn.Module:
    """Return a tiny model without dropout, in float64."""
    torch.manual_seed(0)
    options = {"num_labels": C} | options if "Classification" in name else options
    kind = next(kind for kind in sorted(CONFIGS, key=len)[::-1] if name.startswith(kind))
    config = getattr(transformers, f"{kind}Config")(**CONFIGS[kind], **options)
    return getattr(transformers, name)(config).double().eval()


def batches(name: str, left: bool = False) -> list[dict[str, Tensor]]:
    """Return batches of unequal sizes and lengths, with padding that is masked and ignored."""
    generator, data = torch.Generator().manual_seed(0), []
    for n, length in ((2, 5), (3, 8)):
        ids = torch.randint(3, V, (n, length), generator=generator)
        mask = (torch.arange(length) < length - torch.arange(n)[:, None] % 3).long()
        mask = mask.flip(1) if left else mask
        ids = ids * mask
        labels = ids.masked_fill(mask == 0, -100)
        if "SequenceClassification" in name:
            labels = torch.randint(C, (n,), generator=generator)
        elif "TokenClassification" in name:
            labels = (ids % C).masked_fill(mask == 0, -100)
        elif "MaskedLM" in name:
            labels = labels.masked_fill(torch.arange(length) % 2 == 1, -100)
        elif "ConditionalGeneration" in name:
            labels = labels[:, 1:].contiguous()  # of another length than the source
        data.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return data


def number_of_terms(labels: Tensor, shifted: bool) -> int:
    return int(((labels[:, 1:] if shifted else labels) != -100).sum())


def own_loss(model: nn.Module, data: list[dict[str, Tensor]], shifted: bool) -> Tensor:
    """Return the mean of the model's own loss over all terms of all batches."""
    counts = [number_of_terms(batch["labels"], shifted) for batch in data]
    losses = [model(**batch, use_cache=False).loss for batch in data]
    return sum(loss * n for loss, n in zip(losses, counts, strict=True)) / sum(counts)


def loss_of(model: nn.Module, data: Iterable, **options: Any) -> Tensor:
    """Return the loss of the problem."""
    return HessianLinearOperator(*problem(model, data, **options)).gradient_and_loss()[1]


def tolerance_of(name: str) -> float:
    """Return the error that is allowed; these two compute norms in float32."""
    return 1e-5 if name.startswith(("T5", "Llama")) else 1e-9


def flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([x.flatten() for x in tensors])


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.fixture(autouse=True)
def in_double(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the models compute in float64 where they would go back to float32."""
    monkeypatch.setattr(Tensor, "float", Tensor.double)


@pytest.mark.parametrize("name", core(FEW, CLASSES))
def test_loss_is_the_models_own(name: str):
    model = make(name)
    params = [p for p in model.parameters() if p.requires_grad]
    shifted = "CausalLM" in name or "LMHead" in name
    # these two have NaN in float64 for rows that are masked altogether
    for left in (False,) if name.startswith(("Bloom", "Gemma2")) else (False, True):
        data = batches(name, left)
        H = HessianLinearOperator(*problem(model, data))
        gradient, loss = H.gradient_and_loss()
        own = own_loss(model, data, shifted)
        torch.testing.assert_close(loss, own.detach(), rtol=1e-10, atol=0)
        grads = torch.autograd.grad(own, params, allow_unused=True, materialize_grads=True)
        # norms of some layers are computed in float32
        assert relative(flat(gradient.values()), flat(grads)) <= 1e-6


MATRICES = ["GPT2LMHeadModel", "BertForMaskedLM", "BartForConditionalGeneration"]
MATRICES += ["BertForSequenceClassification", "BertForTokenClassification"]
#: Models, kernels of attention ("tiled": sdpa, as with many weights), and whether layers are
#: computed again in the backward pass.
HESSIANS = [(name, "eager", False) for name in [*MATRICES, "LlamaForCausalLM"]]
HESSIANS += [
    pytest.param(name, attention, checkpointing, marks=pytest.mark.extensive)
    for name in ("GPT2LMHeadModel", "BertForSequenceClassification", "LlamaForCausalLM")
    for attention, checkpointing in (("sdpa", False), ("sdpa", True), ("eager", True))
]
HESSIANS += [(name, "tiled", False) for name in ("GPT2LMHeadModel", "LlamaForCausalLM")]
HESSIANS += [pytest.param("BertForMaskedLM", "tiled", True, marks=pytest.mark.extensive)]


# the name that all versions of transformers have
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize("name, attention, checkpointing", HESSIANS)
def test_hessian_is_that_of_the_models_own_loss(
    name: str, attention: str, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
):
    if attention == "tiled":
        monkeypatch.setattr(overrides.attention, "FEW_WEIGHTS", 0)
        attention = "sdpa"
    model, data = make(name, attn_implementation="eager"), batches(name)
    params = list(model.parameters())
    own = make(name, **NO_DROPOUT, attn_implementation=attention)
    if checkpointing:
        own.train()
        own.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    H = HessianLinearOperator(*problem(own, data))
    v = torch.randn(H.shape[1], dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    loss = own_loss(model, data, name in SHIFTED)
    free: dict[str, Any] = {"allow_unused": True, "materialize_grads": True}
    grads = torch.autograd.grad(loss, params, create_graph=True, **free)
    slope = flat(grads) @ v
    expected = flat(torch.autograd.grad(slope, params, **free))
    tolerance = max(tolerance_of(name), 1e-8)
    assert relative(H @ v, expected) <= tolerance
    with H.linearized():
        for _ in range(2):
            assert relative(H @ v, expected) <= tolerance


def plain(model: nn.Module, data: list[dict[str, Tensor]], shifted: bool) -> Problem:
    """Return the problem in plain words, with the classes on axis 1."""

    def logits(s: Using, X: dict[str, Tensor]) -> Tensor:
        z = s.inner(**X).logits.movedim(-1, 1)
        return z[..., :-1] if shifted else z

    pairs = []
    for batch in data:
        X = {key: x for key, x in batch.items() if key != "labels"}
        pairs.append((X, batch["labels"][:, 1:] if shifted else batch["labels"]))
    params = [p for p in model.parameters() if p.requires_grad]
    return Problem(Using(logits, inner=model), nn.CrossEntropyLoss(), params, pairs, mc=True)


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "BertForSequenceClassification"])
def test_ggn(name: str):
    model, data = make(name, attn_implementation="eager"), batches(name)[:1]
    for key, param in model.named_parameters():
        param.requires_grad_(key.endswith("bias"))
    G = GGNLinearOperator(*problem(model, data))
    expected = reference.ggn(plain(model, data, shifted=name in SHIFTED))
    V = torch.randn(len(expected), 2, generator=torch.Generator().manual_seed(1)).double()
    assert relative(G @ V[:, 0], expected @ V[:, 0]) <= 1e-8
    assert relative(G @ V, expected @ V) <= 1e-8  # by reverse mode
    with G.linearized():
        for _ in range(2):
            assert relative(G @ V, expected @ V) <= 1e-8


def rows_one_by_one(model: nn.Module, params: list[Tensor], data: list, shifted: bool) -> Tensor:
    """Return the gradients of the sums over each sample's terms."""
    rows = []
    for batch in data:
        for n in range(len(batch["labels"])):
            one = {key: value[n : n + 1] for key, value in batch.items()}
            loss = model(**one).loss * number_of_terms(one["labels"], shifted)
            grads = torch.autograd.grad(loss, params, allow_unused=True, materialize_grads=True)
            rows.append(flat(grads))
    return torch.stack(rows)


@pytest.mark.parametrize("name", [*SHIFTED, "T5ForConditionalGeneration", *MATRICES[3:]])
def test_samples_and_factors(name: str):
    model = make(name)
    data, params = batches(name), list(model.parameters())
    arguments = problem(model, data)
    rows = rows_one_by_one(model, params, data, name in SHIFTED)
    operator = PerSampleGradientLinearOperator(*arguments)
    assert not operator.fallbacks
    tolerance = tolerance_of(name)
    assert relative(operator.dense(), rows) <= tolerance
    assert relative(operator.norms(), rows.norm(dim=1)) <= tolerance
    assert relative(operator.gram(), rows @ rows.T) <= tolerance
    count = sum(number_of_terms(b["labels"], name in SHIFTED) for b in data)
    F = EFLinearOperator(*arguments, terms="sample")
    v = torch.ones(len(rows[0]), dtype=torch.float64)
    assert relative(F @ v, rows.T @ (rows @ v) / count) <= tolerance
    E = EKFACLinearOperator(*arguments, fisher_type="empirical", fallback="diagonal")
    assert relative(E.trace(), rows.square().sum() / count) <= tolerance
    K = KFACLinearOperator(*arguments, fallback="diagonal")
    assert (K.inverse(1e-2) @ v).isfinite().all()


def classifier_labels(kind: str, n: int) -> tuple[int, Tensor]:
    """Return the number of outputs, and labels."""
    generator = torch.Generator().manual_seed(n)
    if kind == "single":
        return C, torch.randint(C, (n,), generator=generator)
    if kind == "several":
        return C, torch.randint(2, (n, C), generator=generator).double()
    outputs = 1 if kind == "number" else 2
    labels = torch.randn(n, outputs, generator=generator, dtype=torch.float64)
    return outputs, labels[:, 0] if kind == "number" else labels


@pytest.mark.extensive
@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("name", [*SHIFTED, "BertForSequenceClassification"])
def test_factors(name: str, joint: bool):
    p = plain(make(name), batches(name), shifted=False)
    options = {"fisher_type": "empirical", "separate_weight_and_bias": not joint}
    K = KFACLinearOperator(p.model, p.loss, p.params, p.data, **options)
    expected = kfac_reference.kfac(p, "empirical", joint=joint)
    assert relative(K.to_dense(), expected) <= tolerance_of(name)
    assert {block.structure for block in K.report()} <= {"kronecker", "dense"}


TYPES = [
    ("single", None, nn.CrossEntropyLoss),
    ("several", None, nn.BCEWithLogitsLoss),
    ("number", None, nn.MSELoss),
    ("single", "single_label_classification", nn.CrossEntropyLoss),
    ("several", "multi_label_classification", nn.BCEWithLogitsLoss),
    ("numbers", "regression", nn.MSELoss),
]


@pytest.mark.parametrize("kind, problem_type, loss", TYPES)
def test_types_of_classifiers(kind: str, problem_type: str | None, loss: type):
    name = "BertForSequenceClassification"
    model = make(name, num_labels=classifier_labels(kind, 1)[0])
    model.config.problem_type = problem_type
    data = [b | {"labels": classifier_labels(kind, len(b["labels"]))[1]} for b in batches(name)]
    key = "labels" if problem_type else "label"  # both names are taken
    given = [{key if n == "labels" else n: x for n, x in batch.items()} for batch in data]
    arguments = problem(model, given)
    assert type(arguments[1]) is loss
    assert model.config.problem_type == problem_type
    total = sum(model(**batch).loss * len(batch["labels"]) for batch in data)
    expected = total.detach() / sum(len(batch["labels"]) for batch in data)
    torch.testing.assert_close(loss_of(model, given), expected, rtol=1e-10, atol=0)
    rows = PerSampleGradientLinearOperator(*arguments).dense()
    free: dict[str, Any] = {"allow_unused": True, "materialize_grads": True}
    gradient = torch.autograd.grad(total, list(model.parameters()), **free)
    assert relative(rows.sum(0), flat(gradient)) <= 1e-9


# --- batches


def without(*names: str) -> Callable[[dict], dict]:
    return lambda batch: {k: x for k, x in batch.items() if k not in names}


def test_packed_sequences():
    """Positions that start again separate the sequences of a row."""
    model = make("LlamaForCausalLM", attn_implementation="eager")
    ids = torch.randint(3, V, (1, 9), generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    labels = ids.masked_fill(positions == 0, -100)
    packed = [{"input_ids": ids, "position_ids": positions, "labels": labels}]
    apart = [{"input_ids": x, "labels": x} for x in (ids[:, :4], ids[:, 4:])]
    # their mean over tokens is the same
    torch.testing.assert_close(loss_of(model, packed), loss_of(model, apart), rtol=1e-6, atol=0)
    assert PerSampleGradientLinearOperator(*problem(model, packed)).shape[0] == 1


def test_batches_without_labels():
    """Those of a causal language model predict their own tokens."""
    model, data = make("GPT2LMHeadModel"), batches("GPT2LMHeadModel")
    given = [without("labels")(batch) for batch in data]
    torch.testing.assert_close(loss_of(model, data), loss_of(model, given), rtol=1e-12, atol=0)
    _, _, _, pairs = problem(model, [{"input_ids": batch["input_ids"]} for batch in data])
    assert all(torch.equal(y, X["input_ids"][:, 1:]) for X, y in pairs)


def test_given_inputs_of_the_decoder():
    model, data = make("BartForConditionalGeneration"), batches("BartForConditionalGeneration")
    shift = model.prepare_decoder_input_ids_from_labels
    given = [b | {"decoder_input_ids": shift(b["labels"])} for b in data]
    keys = [next(iter(problem(model, x)[3]))[0].keys() for x in (data, given)]
    assert ["labels" in names for names in keys] == [True, False]
    torch.testing.assert_close(loss_of(model, data), loss_of(model, given), rtol=1e-12, atol=0)


def test_ignored_batches():
    """The first batch may have no term."""
    model, data = make("GPT2LMHeadModel"), batches("GPT2LMHeadModel")
    ignored = data[0] | {"labels": torch.full_like(data[0]["labels"], -100)}
    losses = (loss_of(model, given) for given in ([ignored, data[1]], data[1:]))
    torch.testing.assert_close(*losses, rtol=1e-12, atol=0)


def test_data_is_a_stream():
    """Nothing is kept or copied, tensors are the loader's, and there is a length if it has one."""
    model, data = make("GPT2LMHeadModel"), batches("GPT2LMHeadModel")
    encodings = [transformers.BatchEncoding(batch) for batch in data]

    class Stream:
        passes = 0

        def __iter__(self) -> Iterator:
            Stream.passes += 1
            yield from encodings

    _, _, _, pairs = problem(model, Stream())
    assert Stream.passes == 1
    (X, y), *_ = pairs
    assert Stream.passes == 2
    assert X["input_ids"] is data[0]["input_ids"]
    assert y.data_ptr() == data[0]["labels"][:, 1:].data_ptr()
    assert sorted(encodings[0]) == sorted(data[0])  # the batch has its labels still
    with pytest.raises(TypeError):
        len(pairs)
    assert len(problem(model, encodings)[3]) == 2


def test_loaders_with_collators():
    """A tokenizer's dictionaries of unequal lengths, padded by a collator."""
    model = make("LlamaForCausalLM")
    features = [{"input_ids": torch.arange(3, 3 + n)} for n in (4, 6, 3)]

    def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        ids = [sample["input_ids"] for sample in samples]
        padded = nn.utils.rnn.pad_sequence(ids, batch_first=True)
        mask = (padded != 0).long()
        labels = padded.masked_fill(mask == 0, -100)
        return {"input_ids": padded, "attention_mask": mask, "labels": labels}

    loader = DataLoader(features, batch_size=2, collate_fn=collate)
    state = torch.get_rng_state(), random.getstate()
    rows = PerSampleGradientLinearOperator(*problem(model, loader))
    assert torch.equal(state[0], torch.get_rng_state()) and state[1] == random.getstate()
    assert len(rows.norms()) == 3
    expected = rows_one_by_one(model, list(model.parameters()), [*loader], True)
    assert relative(rows.dense(), expected) <= 1e-5  # padding changes norms in float32


# --- models


class LoRA(nn.Module):
    """A frozen layer in any dtype, and an adapter in float32."""

    def __init__(self, base: nn.Module):
        super().__init__()
        self.base = base
        self.A = nn.Parameter(torch.randn(base.weight.shape[0], 2) / 2)
        self.B = nn.Parameter(torch.randn(2, base.weight.shape[1]) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + (x.to(self.A.dtype) @ self.A @ self.B).to(x.dtype)


class Wrapped(nn.Module):
    """Wraps a model as libraries of adapters do."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.base_model = model

    def get_base_model(self) -> nn.Module:
        return self.base_model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model(*args, **kwargs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_adapters_of_a_frozen_base(dtype: torch.dtype):
    model, data = make("GPT2LMHeadModel").to(dtype).requires_grad_(False), batches("GPT2")
    for block in model.transformer.h:
        block.attn.c_proj = LoRA(block.attn.c_proj)
    arguments = problem(Wrapped(model), data)
    model_func, _, params, _ = arguments
    assert [name.split(".")[-1] for name in params] == ["A", "B"] * 2
    assert all(p is dict(model_func.named_parameters())[n] for n, p in params.items())
    assert model_func.options == {"use_cache": False}
    K = KFACLinearOperator(*arguments)
    assert {block.structure for block in K.report()} == {"kronecker"}
    expected = own_loss(model, data, True).item()
    close = 1e-2 if dtype == torch.bfloat16 else 1e-5
    assert loss_of(Wrapped(model), data).item() == pytest.approx(expected, rel=close)


class Foreign(nn.Module):
    """A model of another package: without a config, labels and a loss."""

    def __init__(self, outputs: int = V):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(V, 4), nn.Linear(4, outputs)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> SimpleNamespace:
        return SimpleNamespace(logits=self.head(self.embed(input_ids).tanh()))


def test_models_of_other_packages():
    model, data = Foreign().double(), batches("GPT2LMHeadModel")
    loss = loss_of(model, data, task="causal-lm")
    logits = [model(b["input_ids"]).logits[:, :-1].flatten(0, 1) for b in data]
    labels = torch.cat([b["labels"][:, 1:].flatten() for b in data])
    expected = nn.functional.cross_entropy(torch.cat(logits), labels)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)


def test_model_is_left_as_it_is():
    class Counting(Foreign):
        calls = 0

        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(V)

        def forward(self, input_ids: Tensor) -> SimpleNamespace:
            self.calls += 1
            return SimpleNamespace(logits=self.norm(super().forward(input_ids).logits[:, -1]))

    model = Counting().train()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    ids, labels = torch.randint(V, (4, 3)), torch.arange(4)
    problem(model, [{"input_ids": ids, "labels": labels}], task="sequence-classification")
    assert model.calls == 0 and model.training
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def test_subclasses_have_their_parents_task():
    class Mine(transformers.GPT2LMHeadModel):
        pass

    model = Mine(transformers.GPT2Config(**GPT)).eval()
    assert problem(model, batches("GPT2"))[0].task == "causal-lm"


def test_images():
    torch.manual_seed(0)
    config = transformers.ViTConfig(**BASE, image_size=4, patch_size=2, num_labels=C)
    model = transformers.ViTForImageClassification(config).double().eval()
    images, labels = torch.randn(4, 3, 4, 4, dtype=torch.float64), torch.arange(4) % C
    data = [{"pixel_values": images, "labels": labels}]
    loss = loss_of(model, data)
    torch.testing.assert_close(loss, model(**data[0]).loss.detach(), rtol=1e-10, atol=0)


def test_decoders_of_images_and_text():
    """Without an encoder, classes for conditional generation are causal language models."""
    torch.manual_seed(0)
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**GROUPED),
        vision_config=transformers.CLIPVisionConfig(**BASE, image_size=4, patch_size=2),
    )
    model = transformers.LlavaForConditionalGeneration(config).double().eval()
    model.model.vision_tower.requires_grad_(False)
    data = batches("LlamaForCausalLM")
    assert problem(model, data)[0].task == "causal-lm"
    loss = loss_of(model, data)
    torch.testing.assert_close(loss, own_loss(model, data, True).detach(), rtol=1e-10, atol=0)


def test_labels_that_are_not_shifted():
    """Decoders of translation models have a loss without a shift."""
    model, data = make("BartForCausalLM"), batches("LlamaForCausalLM")
    with pytest.raises(ValueError, match="labels that are not shifted"):
        problem(model, data)
    loss = loss_of(model, data, task="masked-lm")
    torch.testing.assert_close(loss, own_loss(model, data, False).detach(), rtol=1e-10, atol=0)


def test_nothing_is_imported():
    for node in ast.walk(ast.parse(Path(inspect.getfile(problem)).read_text())):
        names = [name.name for name in node.names] if isinstance(node, ast.Import) else []
        names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
        assert not any(name.startswith("transformers") for name in names)


@pytest.mark.parametrize("name", ["Mixtral", "Qwen2Moe", "Olmoe"])
def test_losses_of_routers_are_refused(name: str):
    experts = {"num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 1}
    options = {**experts, "output_router_logits": True, "router_aux_loss_coef": 1e-2}
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**GROUPED, **options})
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    data = batches("MixtralForCausalLM")
    with pytest.raises(ValueError, match="a loss of its own.*config.output_router_logits"):
        problem(model, data)
    model.config.output_router_logits = False
    torch.testing.assert_close(
        loss_of(model, data), own_loss(model, data, True).detach(), check_dtype=False
    )


class Regularized(nn.Module):
    """Has a loss of its own, with a further term."""

    def __init__(self, term: float):
        super().__init__()
        self.inner, self.term = Foreign(), term

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> SimpleNamespace:
        logits, loss = self.inner(input_ids).logits, None
        if labels is not None:
            pairs = logits[:, :-1].flatten(0, 1).double(), labels[:, 1:].flatten()
            loss = nn.functional.cross_entropy(*pairs).to(logits.dtype) * (1 + self.term)
        return SimpleNamespace(logits=logits, loss=loss)


@pytest.mark.parametrize(
    "term, dtype, is_refused",
    [
        *((5e-5, torch.float32, True), (5e-5, torch.float64, True)),
        *((1e-6, torch.float32, False), (1e-3, torch.bfloat16, False)),
    ],
)
def test_losses_with_further_terms_are_refused(term: float, dtype: torch.dtype, is_refused: bool):
    """Unless these might be rounding."""
    ids = torch.randint(V, (3, 5), generator=torch.Generator().manual_seed(0))
    arguments = Regularized(term).to(dtype), [{"input_ids": ids, "labels": ids}], "causal-lm"
    if not is_refused:
        problem(*arguments)
        return
    with pytest.raises(ValueError, match="Regularized has a loss of its own"):
        problem(*arguments)


#: Wrappers, also around each other.
WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "data parallel": nn.DataParallel,
    "distributed": nn.parallel.DistributedDataParallel,
    "both": lambda model: torch.compile(nn.DataParallel(model), backend="eager"),
    "both, the other way": lambda model: nn.DataParallel(torch.compile(model, backend="eager")),
}


@pytest.fixture
def _process_group(tmp_path: Path) -> Iterator[None]:
    store = f"file://{tmp_path / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("_process_group")
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrappers(wrapper: str):
    model, data = make("GPT2LMHeadModel"), batches("GPT2LMHeadModel")
    expected = problem(model, data)
    found = problem(WRAPPERS[wrapper](model), data)
    assert list(found[2]) == list(expected[2])
    assert found[0].wrapped is model


@pytest.mark.parametrize(
    "name, layer", [*zip(SHIFTED, ["transformer.h.0", "model.layers.0"], strict=True)]
)
def test_names_are_the_models_own(name: str, layer: str):
    model, data = make(name), batches(name)
    model_func, loss_func, params, pairs = copy.deepcopy(problem(model, data))
    assert list(params) == [n for n, _ in model.named_parameters()]
    X = data[0]
    shifted = {n: p + 0.1 for n, p in params.items()}
    values = torch.func.functional_call(model_func, shifted, X)
    assert not torch.allclose(values, model_func(X))
    expected = torch.func.functional_call(model, shifted, (), X).logits[:, :-1]
    torch.testing.assert_close(values, expected.mT)

    chosen = select_parameters(model_func, layer)
    assert all(n.startswith(layer) and p is params[n] for n, p in chosen.items())
    H = HessianLinearOperator(model_func, loss_func, chosen, pairs)
    whole = HessianLinearOperator(model_func, loss_func, params, pairs)
    block = SubmatrixLinearOperator(whole, [layer], [layer])
    v = torch.rand(H.shape[0], dtype=torch.float64)
    torch.testing.assert_close(block @ v, H @ v)
    by = {f"{layer}.mlp": f"{layer}.mlp"}
    assert list(by_layer(block, hutchinson_trace, 1, by=by)) == [*by]


def test_models_that_write_to_parameters_are_refused():
    """RWKV rescales its deeper layers in the first call in eval mode."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 4, "attention_hidden_size": 4, "intermediate_size": 4}
    config = transformers.RwkvConfig(vocab_size=V, context_length=8, num_hidden_layers=7, **sizes)
    model = transformers.RwkvForCausalLM(config).eval()
    ids = torch.arange(8).reshape(2, 4)
    data, before = [{"input_ids": ids, "labels": ids}], flat(model.parameters()).clone()
    with pytest.raises(ValueError, match=r"'rwkv.blocks.0.*weight'.*call the model once"):
        problem(model, data)
    assert torch.equal(flat(model.parameters()), before)
    own = model(**data[0]).loss.detach()  # as the message says
    assert not torch.equal(flat(model.parameters()), before)
    torch.testing.assert_close(loss_of(model, data), own, check_dtype=False)


# --- errors


class Prompted(Foreign):
    """Puts a position before the tokens."""

    def forward(self, input_ids: Tensor) -> SimpleNamespace:
        logits = super().forward(input_ids).logits
        return SimpleNamespace(logits=torch.cat([logits[:, :1], logits], 1))


def each(change: Callable[[dict], Any]) -> Callable[[list], list]:
    return lambda data: [change(batch) for batch in data]


#: Models, changes of their batches, options, and the error.
ERRORS: list[tuple[Any, Callable[[list], Any], dict[str, str], type[Exception], str]] = [
    ("GPT2LMHeadModel", each(lambda b: (b, b["labels"])), {}, TypeError, "Batch 0 .* is a tuple"),
    (
        "BertForMaskedLM", each(without("labels")), {}, ValueError,
        r"has no labels, only \['attention_mask'",
    ),
    (
        "GPT2LMHeadModel",
        each(lambda b: without("labels")(b) | {"attention_mask": torch.ones(len(b), 1, 5, 5)}), {},
        ValueError,
        "attention_mask of shape .*does not say what is padding.*Add the entry 'labels'",
    ),
    (
        "GPT2LMHeadModel", each(lambda b: b | {"labels": b["labels"].tolist()}), {}, TypeError,
        "labels of batch 0 are a list.*return_tensors='pt'",
    ),
    ("GPT2DoubleHeadsModel", list, {}, ValueError, "GPT2DoubleHeadsModel.*Pass task=.*write"),
    ("BertForQuestionAnswering", list, {}, ValueError, "does not follow from its class"),
    (
        "GPT2LMHeadModel", list, {"task": "masked-lm"}, ValueError,
        "that of task 'masked-lm' is.*Pass another task=",
    ),
    ("GPT2LMHeadModel", list, {"task": "generation"}, ValueError, "task must be one of causal-lm"),
    ("GPT2LMHeadModel", lambda data: data[0], {}, TypeError, r"For one batch, pass \[batch\]"),
    ("GPT2LMHeadModel", iter, {}, ValueError, "one-shot iterator"),
    (
        "GPT2LMHeadModel", each(lambda b: b | {"input_ids": b["input_ids"] + V}), {}, IndexError,
        r"GPT2LMHeadModel raised this for the loader's first batch.*'input_ids': \[",
    ),
    ("GPT2LMHeadModel", lambda _: [], {}, ValueError, "loader is empty"),
    (lambda: make, list, {}, TypeError, "model must be a Module, got function"),
    (
        lambda: make("GPT2LMHeadModel").requires_grad_(False), list, {}, ValueError,
        "No parameter of GPT2LMHeadModel requires gradients",
    ),
    (
        lambda: nn.Linear(2, 2), lambda _: [{"input": torch.ones(2, 2), "labels": torch.zeros(2)}],
        {"task": "sequence-classification"}, TypeError,
        "returned a Tensor without logits.*return_dict",
    ),
    (
        Foreign, each(lambda b: b | {"length": 3}), {"task": "causal-lm"}, TypeError,
        r"(?s)unexpected keyword argument 'length'.*remove_columns",
    ),
    (
        Prompted, lambda _: [{"input_ids": torch.ones(2, 4, dtype=torch.long)}],
        {"task": "causal-lm"}, ValueError,
        r"logits of shape \[2, 5, 29\] for labels of shape \[2, 4\].*soft prompts",
    ),
]  # fmt: skip


@pytest.mark.parametrize("model, change, options, error, match", ERRORS)
def test_errors(model: Any, change: Callable, options: dict, error: type[Exception], match: str):
    data = batches(model if isinstance(model, str) else "GPT2LMHeadModel")
    with pytest.raises(error, match=match):
        problem(make(model) if isinstance(model, str) else model(), change(data), **options)


def test_errors_of_operators_name_the_function():
    """Whoever follows the messages, from the first attempt on, is sent to the function."""
    model, data = make("GPT2LMHeadModel").float(), batches("GPT2LMHeadModel")
    params, loss_func = list(model.parameters()), nn.CrossEntropyLoss()
    pairs = [(without("labels")(batch), batch["labels"]) for batch in data]
    attempts: list[tuple[Any, Any, type[Exception]]] = [
        (model, data, ValueError),
        (model, pairs, TypeError),
        (lambda X: model(**X), pairs, TypeError),
        (lambda X: model(**X).logits, pairs, ValueError),
    ]
    for model_func, given, error in attempts:
        with pytest.raises(error, match=r"integrations\.transformers\.problem\(model, loader\)"):
            HessianLinearOperator(model_func, loss_func, params, given)


@pytest.mark.parametrize(
    "name, approx",
    [("GPT2LMHeadModel", "expand"), ("BertForTokenClassification", "reduce"),
     ("BartForConditionalGeneration", "expand")],
)  # fmt: skip
def test_padding_does_not_count_in_factors(name: str, approx: str):
    """KFAC's averages are over tokens, as if each sample were alone and had no padding."""
    model, data, alone = make(name), batches(name), []
    for batch in data:
        for n, length in enumerate(batch["attention_mask"].sum(1).tolist()):
            sample = {key: x[n : n + 1, :length] for key, x in batch.items()}
            sample["labels"] = sample["labels"][:, sample["labels"][0] != -100]
            alone.append(sample)
    options = {"fisher_type": "empirical", "kfac_approx": approx, "fallback": "diagonal"}
    found, expected = (KFACLinearOperator(*problem(model, x), **options) for x in (data, alone))
    torch.testing.assert_close(found.to_dense(), expected.to_dense())
