"""The problems P1, P2 and P3 on which products are timed, and some smaller ones."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Problem = tuple[nn.Module, Tensor, Tensor]


def mlp() -> Problem:
    """A fully connected network with 536k parameters, batch 512."""
    sizes = [784, 512, 256, 10]
    layers = [m for i, o in pairwise(sizes) for m in (nn.Linear(i, o), nn.ReLU())]
    return nn.Sequential(*layers[:-1]), torch.randn(512, 784), torch.randint(10, (512,))


def cnn() -> Problem:
    """A convolutional network with 288k parameters on 3 x 32 x 32 images, batch 64."""
    channels = [3, 32, 64, 128]
    layers = []
    for i, o in pairwise(channels):
        layers += [nn.Conv2d(i, o, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    head = [nn.Flatten(), nn.Linear(2048, 94), nn.ReLU(), nn.Linear(94, 10)]
    return nn.Sequential(*layers, *head), torch.randn(64, 3, 32, 32), torch.randint(10, (64,))


class Block(nn.Module):
    """A pre-norm transformer block with causal attention."""

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
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """A causal language model; its output is [N, vocabulary, T]."""

    def __init__(self, width: int = 128, tokens: int = 64, vocabulary: int = 65, depth: int = 4):
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(0.02 * torch.randn(tokens, width))
        self.blocks = nn.Sequential(*[Block(width, heads=4) for _ in range(depth)])
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.token(x) + self.position)).transpose(1, 2)


def transformer() -> Problem:
    """A transformer with 818k parameters, 64 tokens, batch 16."""
    return Transformer(), torch.randint(65, (16, 64)), torch.randint(65, (16, 64))


class Residual(nn.Module):
    """A residual block of two convolutions, the first of which may halve the image."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.skip = nn.Sequential()
        if stride > 1:
            conv = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.skip = nn.Sequential(conv, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm1(self.conv1(x)).relu()
        return (self.norm2(self.conv2(inner)) + self.skip(x)).relu()


def resnet() -> Problem:
    """A residual network with 78k parameters on 3 x 16 x 16 images, batch 32, in eval mode."""
    stem = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    blocks = [Residual(16, 16, 1), Residual(16, 32, 2), Residual(32, 64, 2)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
    model, X = nn.Sequential(*stem, *blocks, *head), torch.randn(32, 3, 16, 16)
    model(X)  # for running means and variances
    return model.eval(), X, torch.randint(10, (32,))


class ClassesFirst(nn.Module):
    """A language model of transformers, from token indices to logits `[N, vocabulary, T]`."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(input_ids=x).logits.transpose(1, 2)


def gpt2() -> Problem:
    """GPT-2 of transformers with 27k parameters, head tied to embedding, 16 tokens, batch 8."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 33, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4}
    off = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, "use_cache": False}
    config = GPT2Config(**sizes, **off, bos_token_id=1, eos_token_id=1)
    X = torch.randint(33, (8, 16))
    return ClassesFirst(GPT2LMHeadModel(config)), X, X.roll(-1, 1)


def tiny() -> Problem:
    """Nothing to measure."""
    return nn.Sequential(nn.Linear(4, 3)), torch.randn(5, 4), torch.randint(3, (5,))


_ALL = (mlp, cnn, transformer, resnet, gpt2, tiny)
PROBLEMS = {maker.__name__: maker for maker in _ALL}


def make(name: str, device: str) -> Problem:
    """Build a problem, the same in every process."""
    torch.manual_seed(0)
    model, X, y = PROBLEMS[name]()
    return model.to(device), X.to(device), y.to(device)
