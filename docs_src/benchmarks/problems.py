"""The problems P1, P2 and P3 on which products are timed, and a tiny one to try the benchmark."""

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


def tiny() -> Problem:
    """Nothing to measure."""
    return nn.Sequential(nn.Linear(4, 3)), torch.randn(5, 4), torch.randint(3, (5,))


PROBLEMS = {"mlp": mlp, "cnn": cnn, "transformer": transformer, "tiny": tiny}


def make(name: str, device: str) -> Problem:
    """Build a problem, the same in every process."""
    torch.manual_seed(0)
    model, X, y = PROBLEMS[name]()
    return model.to(device), X.to(device), y.to(device)
