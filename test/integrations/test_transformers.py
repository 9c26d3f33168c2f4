"""Hugging Face transformers from tiny configs, against central differences of the gradient."""

import kfac_reference
import pytest
import torch
from contract import error
from problems import Problem
from torch import Tensor, nn

from curvlinops import (
    EKFACLinearOperator,
    GGNLinearOperator,
    HessianLinearOperator,
    KFACLinearOperator,
    PerSampleGradientLinearOperator,
)

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.extensive

SMALL = {
    "gpt2": lambda **options: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=23,
            n_positions=16,
            n_embd=8,
            n_layer=2,
            n_head=2,
            resid_pdrop=0,
            embd_pdrop=0,
            attn_pdrop=0,
            bos_token_id=1,
            eos_token_id=1,
            use_cache=False,
            **options,
        )
    ),
    "bert": lambda **options: transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=23,
            hidden_size=8,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=16,
            max_position_embeddings=16,
            num_labels=3,
            hidden_dropout_prob=0,
            attention_probs_dropout_prob=0,
            **options,
        )
    ),
    "llama": lambda **options: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=23,
            hidden_size=8,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=16,
            pad_token_id=0,
            use_cache=False,
            **options,
        )
    ),
}
# Llama computes its RMS norms in float32, whatever the model's dtype: differences are that noisy
TOLERANCE = {"gpt2": 1e-5, "bert": 1e-5, "llama": 2e-3}


class Logits(nn.Module):
    """Class scores on axis 1."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.model(**batch).logits
        return logits.transpose(1, 2) if logits.ndim == 3 else logits


def batches(classify: bool) -> list[tuple[dict[str, Tensor], Tensor]]:
    """Batches of unequal size and length, with padding tokens that are masked and ignored."""
    data = []
    for n, length in ((2, 5), (3, 7)):
        ids, mask = torch.randint(1, 23, (n, length)), torch.ones(n, length, dtype=torch.long)
        ids[0, -2:] = mask[0, -2:] = 0
        y = torch.randint(3, (n,)) if classify else torch.where(mask == 1, ids.roll(-1, 1), -100)
        data.append(({"input_ids": ids, "attention_mask": mask}, y))
    return data


def gradient(model: nn.Module, params: list[Tensor], data: list) -> Tensor:
    """Return the gradient of the mean over all targets that are not ignored."""
    total = sum(nn.functional.cross_entropy(model(X), y, reduction="sum") for X, y in data)
    count = sum(int((y != -100).sum()) for _, y in data)
    return nn.utils.parameters_to_vector(torch.autograd.grad(total / count, params))


# the name that all versions of transformers have
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", SMALL)
def test_hessian_and_ggn(name: str, attention: str, checkpointing: bool):
    torch.manual_seed(0)
    inner = SMALL[name](attn_implementation=attention).double().eval()
    if checkpointing:
        inner.train()
        inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model, data = Logits(inner), batches(classify=name == "bert")
    params = list(model.parameters())
    H = HessianLinearOperator(model, nn.CrossEntropyLoss(), params, data)
    # uses of the padding row are constants, in the difference they are not
    free = [torch.ones_like(p) for p in params]
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            index = next(i for i, p in enumerate(params) if p is module.weight)
            free[index][module.padding_idx] = 0
    free = nn.utils.parameters_to_vector(free)
    v = torch.randn(H.shape[1], dtype=torch.float64) * free
    theta, eps, slope = nn.utils.parameters_to_vector(params).detach(), 1e-5, 0.0
    Hv = H @ v
    for step in (eps, -eps):
        nn.utils.vector_to_parameters(theta + step * v, params)
        slope = slope + gradient(model, params, data) / (2 * step)
    nn.utils.vector_to_parameters(theta, params)
    assert ((Hv - slope) * free).norm() <= TOLERANCE[name] * slope.norm()
    with H.linearized():
        for _ in range(2):
            torch.testing.assert_close(H @ v, Hv, rtol=1e-8, atol=1e-10 * float(Hv.norm()))

    G = GGNLinearOperator(model, nn.CrossEntropyLoss(), params, data)
    V = torch.randn(G.shape[1], 2, dtype=torch.float64)
    single, columns = G @ V[:, 0], G @ V  # forward and reverse mode
    torch.testing.assert_close(single, columns[:, 0], rtol=1e-6, atol=1e-6 * float(single.norm()))
    torch.testing.assert_close(V[:, 1] @ single, V[:, 0] @ columns[:, 1], rtol=1e-6, atol=1e-9)
    with G.linearized():
        for _ in range(2):
            torch.testing.assert_close(G @ V, columns, rtol=1e-8, atol=1e-10 * float(single.norm()))


@pytest.mark.parametrize("name", SMALL)
def test_gradients_of_single_samples(name: str):
    torch.manual_seed(0)
    model = Logits(SMALL[name]().double().eval())
    data, params = batches(classify=name == "bert"), list(model.parameters())
    loss = nn.CrossEntropyLoss(reduction="sum")
    operator = PerSampleGradientLinearOperator(model, loss, params, data)
    rows = []
    for X, y in data:
        for n in range(len(y)):
            one = {key: value[n : n + 1] for key, value in X.items()}
            grads = torch.autograd.grad(
                loss(model(one), y[n : n + 1]), params, allow_unused=True, materialize_grads=True
            )
            rows.append(torch.cat([g.flatten() for g in grads]))
    rows = torch.stack(rows)
    # Llama computes its norms in float32
    close = {"rtol": 1e-8, "atol": (1e-5 if name == "llama" else 1e-10) * float(rows.norm())}
    torch.testing.assert_close(operator.dense(), rows, **close)
    torch.testing.assert_close(operator.norms(), rows.norm(dim=1), **close)
    size = float(rows.norm())
    torch.testing.assert_close(operator.gram(), rows @ rows.T, rtol=1e-8, atol=close["atol"] * size)
    assert not operator.fallbacks


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("name", SMALL)
def test_kronecker_factored(name: str, joint: bool):
    torch.manual_seed(0)
    model = Logits(SMALL[name]().double().eval())
    data, params = batches(classify=name == "bert"), list(model.parameters())
    loss = nn.CrossEntropyLoss()
    p = Problem(model, loss, params, data, mc=True)
    # Llama computes its norms in float32
    tolerance = 1e-5 if name == "llama" else 1e-9
    options = {"fisher_type": "empirical", "separate_weight_and_bias": not joint}
    operator = KFACLinearOperator(model, loss, params, data, **options)
    expected = kfac_reference.kfac(p, "empirical", joint=joint)
    v = torch.randn(operator.shape[1], 3, dtype=torch.float64)
    assert error(operator @ v, expected @ v) <= tolerance
    assert {block.structure for block in operator.report()} <= {"kronecker", "dense"}
    corrected = EKFACLinearOperator(model, loss, params, data, **options)
    rows = PerSampleGradientLinearOperator(model, loss, params, data).dense()
    exact = rows.square().sum() / sum(int((y != -100).sum()) for _, y in data)
    assert error(corrected.trace(), exact) <= tolerance
