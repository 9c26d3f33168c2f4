r"""
The Hessian of a residual network through training
==================================================

The Hessian of a residual network is too large to write down. Three numbers per checkpoint tell much
of it: its largest eigenvalue, its smallest one, and its trace (Ghorbani et al., *An investigation
into neural net optimization via Hessian eigenvalue density*, ICML 2019; Yao et al., *PyHessian*,
2020).

Batch normalization runs in eval mode: the Hessian is that of the network as it predicts.
"""

import time

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from curvlinops import HessianLinearOperator, eigsh, xtrace

torch.manual_seed(0)
start = time.perf_counter()

# %%
# Data and model
# --------------

images, labels = load_digits(return_X_y=True)
X = torch.tensor(images / 16.0).float().reshape(-1, 1, 8, 8)
y = torch.tensor(labels)
num_data = 512
X, y = X[:num_data], y[:num_data]


class Residual(nn.Module):
    """Two convolutions with batch normalization, added to their input."""

    def __init__(self, width: int):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the block's output to its input."""
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


width = 16
model = nn.Sequential(
    nn.Conv2d(1, width, 3, padding=1),
    Residual(width),
    nn.AvgPool2d(2),
    Residual(width),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(width, 10),
)
params = list(model.parameters())
loss_func = nn.CrossEntropyLoss()
print(f"{sum(p.numel() for p in params)} parameters")

# %%
# Training
# --------
#
# One operator serves the whole training: it follows the parameters. Each search for an eigenvalue
# starts from the eigenvector of the search before.

model.eval()
H = HessianLinearOperator(
    model, loss_func, params, list(zip(X.split(128), y.split(128), strict=True))
)
num_epochs, interval = 30, 3
optimizer = torch.optim.SGD(params, lr=0.05, momentum=0.9)
epochs, losses, curves = [], [], {"largest": [], "smallest": [], "trace": []}
starts = {"LA": None, "SA": None}

for epoch in range(num_epochs + 1):
    if epoch % interval == 0:
        model.eval()
        epochs.append(epoch)
        with torch.no_grad():
            losses.append(float(loss_func(model(X), y)))
        for which, name in [("LA", "largest"), ("SA", "smallest")]:
            found = eigsh(H, k=1, which=which, tol=1e-2, v0=starts[which], seed=0)
            starts[which] = found.eigenvectors[:, 0]
            curves[name].append(float(found.eigenvalues[0]))
        curves["trace"].append(float(xtrace(H, 20, seed=0)))
    model.train()
    for batch in torch.randperm(num_data).split(64):
        optimizer.zero_grad()
        loss_func(model(X[batch]), y[batch]).backward()
        optimizer.step()

# %%
# The largest eigenvalue and the trace rise while the network learns, and fall when it is certain of
# all its labels. Negative curvature becomes small compared with the positive one.

fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
left.plot(epochs, curves["largest"], "o-", label="largest eigenvalue")
left.plot(epochs, curves["smallest"], "o-", label="smallest eigenvalue")
left.plot(epochs, curves["trace"], "o-", label="trace")
left.set(xlabel="epoch", ylabel="eigenvalue or trace", title="Hessian")
left.set_yscale("symlog", linthresh=1)
left.legend(loc="lower right", fontsize="small")
right.semilogy(epochs, losses, "o-")
right.set(xlabel="epoch", ylabel="loss", title="Training loss")
fig.savefig("resnet_training.png", dpi=150)
assert losses[-1] < losses[0]
assert all(value > 0 for value in curves["largest"])

print(f"Figure: resnet_training.png. Time: {time.perf_counter() - start:.0f} s")
