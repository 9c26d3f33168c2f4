"""The five problems of the tables, those of tasks, one of real size, and others that grow.

Names are those of functions, with numbers in parentheses: `deep` or `deep(layers=400)`. Of `NAME
restricted`, only linear and convolutional layers are trained. Problems of the test suite are
`test/NAME`.
"""

import importlib.util
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

SHARED = Path(__file__).parents[2] / "test" / "shared"


@dataclass
class Problem:
    """What is differentiated.

    Attributes:
        options: Further arguments of this package's operators.
        exact: Whether there are few outputs per sample, so that exact loss Hessians are feasible.
    """

    model: nn.Module | Callable
    loss: nn.Module | Callable
    params: list[Tensor] | dict[str, Tensor]
    data: list[tuple]
    options: dict[str, Any] = field(default_factory=dict)
    exact: bool = True

    def step(self) -> None:
        """Change the numbers of all parameters, as an optimizer does."""
        params = self.params.values() if isinstance(self.params, dict) else self.params
        with torch.no_grad():
            for param in params:
                param.add_(1e-6)


def _classifier(model: nn.Module, X: Tensor, classes: int, batches: int = 1) -> Problem:
    data = list(
        zip(X.chunk(batches), torch.randint(classes, (len(X),)).chunk(batches), strict=True)
    )
    return Problem(model, nn.CrossEntropyLoss(), list(model.parameters()), data)


def _dense(sizes: list[int], activation: type[nn.Module]) -> nn.Module:
    layers = [m for i, o in pairwise(sizes) for m in (nn.Linear(i, o), activation())]
    return nn.Sequential(*layers[:-1])


def tiny(batches: int = 1) -> Problem:
    """A network of widths 10-20-5, batch 32."""
    return _classifier(_dense([10, 20, 5], nn.Tanh), torch.randn(32 * batches, 10), 5, batches)


def deep(layers: int = 100, width: int = 32, classes: int = 10) -> Problem:
    """A network of 100 linear layers of width 32, batch 64."""
    return _classifier(
        _dense([width] * layers + [classes], nn.ReLU), torch.randn(64, width), classes
    )


def mlp(batches: int = 1) -> Problem:
    """A network of widths 784-512-256-10, batch 512."""
    X = torch.randn(512 * batches, 784)
    return _classifier(_dense([784, 512, 256, 10], nn.ReLU), X, 10, batches)


class Residual(nn.Module):
    """A residual block of two convolutions, the first of which may halve the image."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.act1, self.act2 = nn.ReLU(), nn.ReLU()
        self.skip = nn.Sequential()
        if stride > 1:
            conv = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.skip = nn.Sequential(conv, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.act1(self.norm1(self.conv1(x)))
        return self.act2(self.norm2(self.conv2(inner)) + self.skip(x))


def resnet(width: int = 16) -> Problem:
    """A residual network with 78k parameters on 3 x 16 x 16 images, batch 32, in eval mode."""
    stem = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    blocks = [Residual(width, width, 1)]
    blocks += [Residual(width, 2 * width, 2), Residual(2 * width, 4 * width, 2)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10)]
    model, X = nn.Sequential(*stem, *blocks, *head), torch.randn(32, 3, 16, 16)
    model(X)  # for running means and variances
    return _classifier(model.eval(), X, 10)


def resnet18(width: int = 16) -> Problem:
    """A ResNet-18 with 0.7 million parameters on 3 x 32 x 32 images, batch 64, in eval mode."""
    stem = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    widths, blocks = [width, width, 2 * width, 4 * width, 8 * width], []
    for inputs, outputs in pairwise(widths):
        blocks += [Residual(inputs, outputs, outputs // inputs), Residual(outputs, outputs, 1)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, 10)]
    model, X = nn.Sequential(*stem, *blocks, *head), torch.randn(64, 3, 32, 32)
    model(X)  # for running means and variances
    return _classifier(model.eval(), X, 10)


class Block(nn.Module):
    """A pre-norm transformer block with causal attention, in elementary operations."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        attended = scores.masked_fill(future, -torch.inf).softmax(-1) @ v
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Encoder(nn.Module):
    """Transformer blocks on vectors, as embeddings make them, and a head; output `[N, 10, T]`."""

    def __init__(self, width: int, depth: int):
        super().__init__()
        self.blocks = nn.Sequential(*[Block(width, heads=12) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(x))).transpose(1, 2)


class GPT(nn.Module):
    """A language model like GPT-2, its head tied to the embedding; output `[N, vocabulary, T]`."""

    def __init__(self, width: int, tokens: int, vocabulary: int, depth: int):
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)
        self.blocks = nn.Sequential(*[Block(width, heads=4) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.token.weight, std=0.02)
        self.head.weight = self.token.weight

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device).expand_as(x)
        hidden = self.blocks(self.token(x) + self.position(positions))
        return self.head(self.norm(hidden)).transpose(1, 2)


def gpt2(tokens: int = 32, width: int = 64, samples: int = 8) -> Problem:
    """A transformer like GPT-2: 4 blocks of width 64, vocabulary 65, 32 tokens, batch 8."""
    model, X = GPT(width, tokens, vocabulary=65, depth=4), torch.randint(65, (samples, tokens))
    params, data = list(model.parameters()), [(X, X.roll(-1, 1))]
    return Problem(model, nn.CrossEntropyLoss(), params, data, exact=False)


class Logits(nn.Module):
    """A language model of Hugging Face as a function of tokens; output `[N, vocabulary, T]`."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(input_ids=x).logits.transpose(1, 2)


def huggingface(width: int = 128, depth: int = 4) -> Problem:
    """Hugging Face's GPT-2 with 4 blocks of width 128, vocabulary 1,000, batch 8 of 32 tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 1000, "n_positions": 32, "n_head": 4, "use_cache": False}
    sizes |= {"bos_token_id": None, "eos_token_id": None}
    config = GPT2Config(n_layer=depth, n_embd=width, attn_implementation="eager", **sizes)
    model, X = Logits(GPT2LMHeadModel(config)).eval(), torch.randint(1000, (8, 32))
    data = [(X, X.roll(-1, 1))]
    return Problem(model, nn.CrossEntropyLoss(), list(model.parameters()), data, exact=False)


RESTRICTED = " restricted"
#: The problems of which all is measured, and those of single tasks.
BASIC = {maker.__name__: maker for maker in (tiny, deep, mlp, resnet, gpt2)}
PROBLEMS = BASIC | {maker.__name__: maker for maker in (resnet18, huggingface)}
LARGE = "transformer"


def _of_the_test_suite(name: str) -> Problem:
    """Build a problem of the test suite, whose module has the same name as this one."""
    if "suite" not in sys.modules:
        sys.path.append(str(SHARED))
        spec = importlib.util.spec_from_file_location("suite", SHARED / "problems.py")
        sys.modules["suite"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["suite"])
    p = sys.modules["suite"].make(name)
    options = {"batch_size_fn": p.batch_size_fn, "reduction": p.reduction}
    return Problem(p.model, p.loss, p.params, p.data, options)


def _restrict(problem: Problem) -> None:
    """Freeze all parameters but those that linear and convolutional layers have for themselves."""
    modules = list(problem.model.modules())
    owners = Counter(param for module in modules for param in module.parameters(recurse=False))
    layers = [module for module in modules if isinstance(module, nn.Linear | nn.Conv2d)]
    kept = {param for layer in layers for param in layer.parameters() if owners[param] == 1}
    for param in problem.model.parameters():
        param.requires_grad_(param in kept)
    problem.params = [param for param in problem.model.parameters() if param in kept]


def about(name: str) -> str:
    """Return a sentence about a problem."""
    if name.startswith(LARGE):
        return " ".join(transformer.__doc__.split())
    restricted = name.endswith(RESTRICTED)
    more = " Only parameters of linear and convolutional layers, without the tied head."
    call = name.removesuffix(RESTRICTED)
    maker, _, numbers = call.rstrip(")").partition("(")
    changed = f" Here with {numbers.replace('=', ' = ')}." if numbers else ""
    return PROBLEMS[maker].__doc__ + changed + (more if restricted else "")


def transformer(width: int = 768, depth: int = 12) -> Problem:
    """A transformer of 12 blocks of width 768, 2 batches of 4 x 64 vectors: the size of GPT-2.

    Its linear layers are trained, 85 million parameters.
    """
    model = Encoder(width, depth)
    data = [(torch.randn(4, 64, width), torch.randint(10, (4, 64))) for _ in range(2)]
    problem = Problem(model, nn.CrossEntropyLoss(), list(model.parameters()), data, exact=False)
    _restrict(problem)
    return problem


def make(name: str, device: str = "cpu") -> Problem:
    """Build a problem, the same in every process and at every call."""
    if name.startswith("test/"):
        return _of_the_test_suite(name.removeprefix("test/"))
    torch.manual_seed(0)
    call = name.removesuffix(RESTRICTED)
    maker, numbers = re.fullmatch(r"(\w+)(?:\((.*)\))?", call).groups()
    pairs = (pair.split("=") for pair in (numbers or "").split(",") if pair)
    make_problem = transformer if maker == LARGE else PROBLEMS[maker]
    problem = make_problem(**{key.strip(): int(value) for key, value in pairs})
    if call != name:
        _restrict(problem)
    problem.model.to(device)
    problem.data = [(X.to(device), y.to(device)) for X, y in problem.data]
    return problem
