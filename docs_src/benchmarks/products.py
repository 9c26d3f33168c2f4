"""Time of operator products, as multiples of one gradient on the same batch.

`make bench` runs all problems; `make bench BENCH_ARGS="--problems cnn --repeats 3"` some of them.
The contenders take turns, and the minimum over the repeats counts. `func` is the same product
written by hand with torch.func.
"""

import argparse
import time
from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vjp
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

from curvlinops import EFLinearOperator, GGNLinearOperator, HessianLinearOperator

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


PROBLEMS = {"mlp": mlp, "cnn": cnn, "transformer": transformer}


def contenders(problem: Problem, columns: int) -> dict[str, Callable[[], object]]:
    """Return what is timed, by name; the first one is the unit."""
    model, X, y = problem
    names, params = zip(*model.named_parameters(), strict=True)
    theta = {name: param.detach() for name, param in zip(names, params, strict=True)}
    v = {name: torch.randn_like(value) for name, value in theta.items()}
    vector = torch.cat([value.flatten() for value in v.values()])
    matrix = torch.randn(len(vector), columns)

    def output(values: dict[str, Tensor]) -> Tensor:
        return functional_call(model, values, X)

    def hessian_by_func() -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return jvp(grad(lambda values: F.cross_entropy(output(values), y)), (theta,), (v,))[1]

    def ggn_by_func() -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            z, Jv = jvp(output, (theta,), (v,))
            HJv = jvp(grad(lambda z: F.cross_entropy(z, y)), (z,), (Jv,))[1]
            return vjp(output, theta)[1](HJv)[0]

    def operator(kind: type) -> Callable[[Tensor], Tensor]:
        A = kind(model, nn.CrossEntropyLoss(), list(params), [(X, y)], check_deterministic=False)
        return A.__matmul__

    H, G, E = (operator(k) for k in (HessianLinearOperator, GGNLinearOperator, EFLinearOperator))
    return {
        "gradient": lambda: torch.autograd.grad(F.cross_entropy(model(X), y), params),
        "Hessian, func": hessian_by_func,
        "Hessian": lambda: H(vector),
        "GGN, func": ggn_by_func,
        "GGN": lambda: G(vector),
        "empirical Fisher": lambda: E(vector),
        f"Hessian, {columns} columns": lambda: H(matrix),
        f"GGN, {columns} columns": lambda: G(matrix),
    }


def main() -> None:
    """Time all contenders and print a table for each problem."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=list(PROBLEMS))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--columns", type=int, default=16)
    args = parser.parse_args()

    for name in args.problems:
        torch.manual_seed(0)
        problem = PROBLEMS[name]()
        timed = contenders(problem, args.columns)
        seconds = dict.fromkeys(timed, float("inf"))
        # the first round warms up
        for round_ in tqdm(range(args.repeats + 1), desc=name, leave=False):
            for what, run in timed.items():
                start = time.perf_counter()
                run()
                if round_:
                    seconds[what] = min(seconds[what], time.perf_counter() - start)
        unit = seconds["gradient"]
        num_params = sum(p.numel() for p in problem[0].parameters())
        print(f"\n{name}: {num_params} parameters, one gradient takes {1e3 * unit:.1f} ms")
        for what, duration in seconds.items():
            print(f"  {what:<24}{duration / unit:6.2f} x")


if __name__ == "__main__":
    main()
