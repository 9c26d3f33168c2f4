"""A user's program, which type checkers read and nobody runs: `make lint`.

Each line with `type: ignore` must be an error, or mypy reports the comment.
"""

from typing import assert_type

import numpy as np
import torch
from torch import Tensor, nn

import curvlinops as c
from curvlinops import influence, kfac_utils, training
from curvlinops.algorithms.sampling import Estimate
from curvlinops.algorithms.spectrum import SpectralDensity

model, loss = nn.Linear(3, 2), nn.MSELoss()
params = list(model.parameters())
named = dict(model.named_parameters())
data = [(torch.ones(4, 3), torch.ones(4, 2))]
v = torch.ones(8)
w: np.ndarray = np.ones(8)

# --- operators on data: arguments

H = c.HessianLinearOperator(model, loss, params, data)
c.HessianLinearOperator(model, loss, named, data, True, False, 4, [1, 1], len)
c.HessianLinearOperator(model, loss, model.parameters(), data, cache=10**6, reduction="sum")
G = c.GGNLinearOperator(model, loss, params, data, mc_samples=2, seed=0)
F = c.FisherMCLinearOperator(model, loss, params, data, chunk_size=2)
E = c.EFLinearOperator(model, loss, params, data, terms="sample")
D = c.GGNDiagonalLinearOperator(model, loss, params, data, mc_samples=1)
S = c.PerSampleGradientLinearOperator(model, loss, params, data, subsampling=[0, 2])
J = c.JacobianLinearOperator(model, params, data)
Jt = c.TransposedJacobianLinearOperator(model, params, data)
K = c.KFACLinearOperator(model, loss, params, data, fisher_type=c.FisherType.TYPE2)
EK = c.EKFACLinearOperator(model, loss, params, data, kfac_approx={"": "reduce"})

c.HessianLinearOperator(model, loss, params, data, progresbar=True)  # type: ignore[call-arg]
c.HessianLinearOperator(model, loss, params)  # type: ignore[call-arg]
c.HessianLinearOperator(model, loss, params, data, num_data="4")  # type: ignore[arg-type]
c.HessianLinearOperator(model, loss, params, data, mc_samples=1)  # type: ignore[call-arg]
c.GGNLinearOperator(model, loss, params, data, mc_sample=1)  # type: ignore[call-arg]
c.FisherMCLinearOperator(model, loss, params, data, cach="none")  # type: ignore[call-arg]
c.EFLinearOperator(model, loss, params, data, term="sample")  # type: ignore[call-arg]
c.GGNDiagonalLinearOperator(model, loss, params, data, exact=True)  # type: ignore[call-arg]
c.PerSampleGradientLinearOperator(model, loss, params, data, rows=[0])  # type: ignore[call-arg]
c.JacobianLinearOperator(model, params, data, block_sizes=[2])  # type: ignore[call-arg]
c.TransposedJacobianLinearOperator(model, params, data, seed=0)  # type: ignore[call-arg]
c.KFACLinearOperator(model, loss, params, data, fisher_typ="mc")  # type: ignore[call-arg]
c.EKFACLinearOperator(model, loss, params, data, fisher_typ="mc")  # type: ignore[call-arg]

# --- products and algebra

assert_type(H @ v, Tensor)
assert_type(H @ w, np.ndarray)
assert_type(H @ params, list[Tensor])
assert_type(H @ torch.autograd.grad(loss(v, v), params), list[Tensor])
assert_type(H @ named, dict[str, Tensor])
assert_type(J @ named, Tensor)
assert_type(S @ named, Tensor)
assert_type(w @ H, np.ndarray)
assert_type(H.matvec(v), Tensor)
assert_type(H.dot(w), np.ndarray)
assert_type(H @ G, c.TorchLinearOperator)
assert_type(J.T @ J, c.TorchLinearOperator)
assert_type(H + G, c.TorchLinearOperator)
assert_type(H - G, c.TorchLinearOperator)
assert_type(2 * H, c.TorchLinearOperator)
assert_type(H / 2, c.TorchLinearOperator)
assert_type(-H, c.TorchLinearOperator)
assert_type(H**2, c.TorchLinearOperator)
assert_type(H + 0.1 * c.IdentityLinearOperator(H.space), c.TorchLinearOperator)
assert_type(H.shape, tuple[int, int])
assert_type(H.dtype, np.dtype)
assert_type(H.device, torch.device)
assert_type(H.space, c.ParameterSpace)
assert_type(H.gradient_and_loss(), tuple[list[Tensor] | dict[str, Tensor], Tensor])
H @ "v"  # type: ignore[arg-type]
H * "2"  # type: ignore[arg-type]
H.trase()  # type: ignore[attr-defined]

assert_type(D.diagonal(), Tensor)
assert_type(D.inverse(1.0), c.StructuredLinearOperator)
assert_type(D.structure, c.DiagonalLinearOperator)
assert_type(S.norms(), Tensor)
assert_type(J.gram(), Tensor)

# --- structure

assert_type(K.inverse(damping=1e-3), c.KFACInverseLinearOperator)
assert_type(c.KFACInverseLinearOperator(EK, damping=(1e-3, 1e-2)) @ v, Tensor)
assert_type(K.logdet(), Tensor)
assert_type(K.damped({"*": 0.1, "0": torch.ones(())}).logdet(), Tensor)
assert_type(c.functional_variance(J, K.damped(0.1).inverse()), Tensor)
assert_type(2 * K, c.StructuredLinearOperator)
assert_type(K.sample(seed=0), Tensor)
assert_type(
    c.EKFACLinearOperator.from_state_dict(EK.state_dict(), model, loss, params, data),
    c.EKFACLinearOperator,
)
K.inverse(dampin=1e-3)  # type: ignore[call-arg]
c.KFACLinearOperator.from_state_dict({}, model, loss, params, data, sed=0)  # type: ignore[call-arg]
c.KFACInverseLinearOperator(K, use_exact=True)  # type: ignore[call-arg]

blocks = [c.DiagonalLinearOperator(v), c.KroneckerProductLinearOperator(torch.eye(2), torch.eye(4))]
assert_type(c.BlockDiagonalLinearOperator(blocks).trace(), Tensor)
assert_type(
    c.EighDecomposedLinearOperator(v, torch.eye(8)).inverse(0.1), c.StructuredLinearOperator
)
assert_type(c.load("file"), c.StructuredLinearOperator)
c.load("file", devise="cpu")  # type: ignore[call-arg]

# --- solvers

cg = c.CGInverseLinearOperator(H, preconditioner=K.inverse(1e-3), rtol=1e-3)
assert_type(cg @ w, np.ndarray)
assert_type(cg.solve(v), c.Solution[Tensor])
assert_type(cg.solve(params).x, list[Tensor])
assert_type(cg.solve(w), c.Solution[np.ndarray])
assert_type(c.MINRESInverseLinearOperator(np.eye(8)).solve(named).x, dict[str, Tensor])
assert_type(c.LSMRInverseLinearOperator(J).matvec_with_info(w).x, np.ndarray)
assert_type(c.NeumannInverseLinearOperator(G, 5, preconditioner=K.inverse(1.0)) @ v, Tensor)
assert_type(c.SubmatrixLinearOperator(H, ["weight"], slice(0, 6)) @ v, Tensor)
c.CGInverseLinearOperator(H, max_itr=3)  # type: ignore[call-arg]
c.NeumannInverseLinearOperator(H, terms=5)  # type: ignore[call-arg]
c.MINRESInverseLinearOperator(H, dampng=1.0)  # type: ignore[call-arg]
c.LSMRInverseLinearOperator(H, damping=1.0)  # type: ignore[call-arg]

# --- algorithms

values, vectors = c.eigsh(H, k=2)
assert_type(values, Tensor)
assert_type(c.eigsh(np.eye(3), 1, "LA").eigenvectors, Tensor)
for estimator in (c.hutchinson_trace, c.hutchinson_squared_fro, c.hutchpp_trace):
    assert_type(estimator(H, 10, "gaussian"), Tensor)
assert_type(c.xtrace(H, num_matvecs=10, seed=0), Tensor)
assert_type(c.xnystrace(np.eye(3), 10), Tensor)
assert_type(c.xtrace(H, 10, return_error=True), Estimate)
assert_type(c.hutchinson_diag(np.eye(3), 10), Tensor)
assert_type(c.xdiag(H, 10, return_error=True).standard_error, Tensor)
assert_type(c.trace_function(H, torch.exp, 20), Tensor)
assert_type(c.lanczos_logdet(G, rtol=0.1), Tensor)
assert_type(c.quadratic_form(G, torch.ones(3), 0.1), c.Interval)
assert_type(c.dottest(J), float)
assert_type(c.lanczos_approximate_spectrum(H, 20), tuple[Tensor, Tensor])
assert_type(c.lanczos_approximate_log_spectrum(np.eye(9), 5)[1], Tensor)
density = c.lanczos_approximate_spectrum(H, 20, return_error=True)
assert_type(density, SpectralDensity)
c.plot_spectrum(*density, label="Hessian")
assert_type(c.loss_along(H, v, [0.0, 1.0]).losses, Tensor)
c.plot_loss(*c.loss_along(H, named, np.ones(3)))
assert_type(H.space.split(vectors), dict[str, Tensor])
assert_type(c.by_layer(H, c.eigsh, k=2), dict[str, c.Eigenpairs])
c.plot_by_layer(c.by_layer(H, c.xtrace, 10, by={"first": "0", "rest": ["1", "2"]}))
c.HessianLinearOperator(model, loss, c.select_parameters(model, "*.bias"), data)
c.plot_spectrum(*c.LanczosApproximateSpectrumCached(H, 20).approximate_spectrum(num_repeats=2))
c.plot_spectrum(*c.LanczosApproximateSpectrumCached(H, 9).approximate_log_spectrum(epsilon=0.1))
c.eigsh(H, num=2)  # type: ignore[call-arg]
c.eigsh(H, k="2")  # type: ignore[arg-type]
c.xtrace(H, 10, distributon="sphere")  # type: ignore[call-overload]
c.xdiag(H, 10, "gaussian")  # type: ignore[call-overload]
c.lanczos_logdet(H, num_reps=2)  # type: ignore[call-overload]
c.lanczos_approximate_spectrum(H, 20, points=10)  # type: ignore[call-overload]
c.dottest(H, tests=2)  # type: ignore[call-arg]

# --- influence

store = influence.GradientStore.write(S, "gradients", rank=8, basis=EK, relative_damping=0.2)
assert_type(store.scores(S), Tensor)
P = influence.preconditioned(S, EK, rank=2)
assert_type(P, dict[str, Tensor] | c.LowRankColumns)
assert_type(influence.self_scores(S, EK, 0.2), Tensor)
assert_type(influence.top_scores(S, P, 2).indices, Tensor)
for numbers, some in influence.score_batches(S, P):
    assert_type(some[numbers], Tensor)
influence.preconditioned(S, EK, damping=0.1)  # type: ignore[call-arg]
influence.GradientStore.write(S, "gradients", bases=EK)  # type: ignore[call-arg]
influence.GradientStore("gradients").scores(S, 0.1)  # type: ignore[call-arg]

# --- training

monitor = training.CurvatureMonitor(H, "log.csv", every=10, by={"all": "*"})
assert_type(monitor.measure(), dict[str, float])
training.CurvatureMonitor(H, evry=10)  # type: ignore[call-arg]
preconditioner = training.KFACPreconditioner(K, torch.optim.SGD(params), 0.1, clip=None)
training.KFACPreconditioner(EK, torch.optim.SGD(params), dampin=0.1)  # type: ignore[call-arg]

# --- building blocks

images = torch.ones(1, 3, 4, 4)
assert_type(kfac_utils.extract_patches(images, 3, padding="same"), Tensor)
assert_type(kfac_utils.extract_averaged_patches(images, (3, 3)), Tensor)
assert_type(kfac_utils.loss_hessian_matrix_sqrt(v[None], v[None], loss), Tensor)
kfac_utils.loss_hessian_matrix_sqrt(v, v, los=loss)  # type: ignore[call-arg]
