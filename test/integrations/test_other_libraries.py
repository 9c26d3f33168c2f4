"""Stand-ins of models of other libraries: weights by heads with hooks, quantized bases."""

import torch
from torch import Tensor, nn

from curvlinops import (
    EKFACLinearOperator,
    HessianLinearOperator,
    KFACLinearOperator,
    PerSampleGradientLinearOperator,
)


class Hooked(nn.Module):
    """Attention with an axis for the heads and a place for hooks, as TransformerLens has them."""

    def __init__(self, num_words: int = 11, size: int = 8, heads: int = 2):
        super().__init__()
        self.W_E = nn.Parameter(torch.randn(num_words, size))
        self.W_V = nn.Parameter(torch.randn(heads, size, size // heads) / size**0.5)
        self.W_O = nn.Parameter(torch.randn(heads, size // heads, size) / size**0.5)
        self.W_U = nn.Parameter(torch.randn(size, num_words) / size**0.5)
        self.hook_z = nn.Identity()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.W_E[tokens]
        z = self.hook_z(torch.einsum("ntd,hde->nthe", x, self.W_V).cumsum(1))
        return (x + torch.einsum("nthe,hed->ntd", z, self.W_O)) @ self.W_U


class NextToken(nn.Module):
    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens)[:, :-1].movedim(-1, 1)


def test_hooks_are_a_part_of_the_model():
    torch.manual_seed(0)
    hooked = Hooked().double().eval()
    wrapped, loss_func = NextToken(hooked), nn.CrossEntropyLoss()
    tokens = torch.randint(11, (6, 5))
    params = {n: p for n, p in wrapped.named_parameters() if n.endswith(("W_V", "W_O"))}
    problem = (wrapped, loss_func, params, [(tokens, tokens[:, 1:])])
    rows = PerSampleGradientLinearOperator(*problem)

    def norms() -> Tensor:
        losses = [loss_func(wrapped(x), x[:, 1:]) * 4 for x in tokens.split(1)]  # of four tokens
        grads = [torch.autograd.grad(loss, list(params.values())) for loss in losses]
        return torch.stack([torch.cat([g.flatten() for g in gs]).norm() for gs in grads])

    plain = rows.norms()
    torch.testing.assert_close(plain, norms())
    assert not rows.fallbacks
    assert {block.structure for block in KFACLinearOperator(*problem).report()} == {"kronecker"}

    handle = hooked.hook_z.register_forward_hook(lambda module, args, z: z / 2)
    torch.testing.assert_close(rows.norms(), norms())
    assert not torch.allclose(rows.norms(), plain)
    handle.remove()
    torch.testing.assert_close(rows.norms(), plain)


def unpacked(packed: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    pair = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
    return (pair.to(dtype) - 8) * scale


class Multiply(torch.autograd.Function):
    """Unpacks a weight of four bits and multiplies, as the layers of bitsandbytes do."""

    @staticmethod
    def forward(ctx, x: Tensor, packed: Tensor, scale: float) -> Tensor:
        ctx.packed, ctx.scale = packed, scale
        return x @ unpacked(packed, scale, x.dtype).T

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple:
        return g @ unpacked(ctx.packed, ctx.scale, g.dtype), None, None


class Adapted(nn.Module):
    def __init__(self, inputs: int, outputs: int, rank: int = 2, is_packed: bool = True):
        super().__init__()
        packed = torch.randint(256, (outputs, inputs // 2), dtype=torch.uint8)
        weight = packed if is_packed else unpacked(packed, 0.05, torch.float32)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.A = nn.Linear(inputs, rank, bias=False)
        self.B = nn.Linear(rank, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        packed = self.weight.dtype == torch.uint8
        base = Multiply.apply(x, self.weight, 0.05) if packed else x @ self.weight.T
        return base + self.B(self.A(x))


def test_adapters_of_a_quantized_base():
    def products(is_packed: bool) -> list[Tensor]:
        torch.manual_seed(0)
        layers = [Adapted(*sizes, is_packed=is_packed) for sizes in ((8, 16), (16, 4))]
        model = nn.Sequential(layers[0], nn.Tanh(), layers[1]).eval()
        params = {name: p for name, p in model.named_parameters() if p.requires_grad}
        data = [(torch.randn(12, 8), torch.randint(4, (12,)))]
        problem = (model, nn.CrossEntropyLoss(), params, data)
        E = EKFACLinearOperator(*problem)
        assert {block.structure for block in E.report()} == {"kronecker"}
        v = torch.ones(E.shape[0])
        H, rows = HessianLinearOperator(*problem), PerSampleGradientLinearOperator(*problem)
        return [H @ v, E @ v, rows.norms()]

    for product, expected in zip(products(True), products(False), strict=True):
        assert torch.equal(product, expected)
