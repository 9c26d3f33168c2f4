"""A thread is inside of a solver while another one uses other operators on the same model."""

import threading

import torch
from contract import ALL, error, matrix, vectors
from torch import Tensor, nn

import curvlinops as C


def test_other_operators_while_a_solver_runs():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    loss, params = nn.CrossEntropyLoss(), list(model.parameters())
    data = [(torch.randn(5, 3).double(), torch.randint(2, (5,))) for _ in range(2)]

    def matrices() -> dict[str, Tensor]:
        found = {}
        for name, case in ALL.items():
            losses = (loss,) if case.takes_loss else ()
            found[name] = matrix(case.operator(model, *losses, params, data))
        return found

    G = C.GGNLinearOperator(model, loss, params, data).damped(0.1)
    b, truth, solution = vectors(G), matrices(), C.CGInverseLinearOperator(G) @ vectors(G)
    inside, resumed, found, calls = threading.Event(), threading.Event(), [], []

    def preconditioner(x: Tensor) -> Tensor:
        calls.append(x)
        if len(calls) == 2:  # after the first product
            inside.set()
            assert resumed.wait(60)
        return x

    inverse = C.CGInverseLinearOperator(G, preconditioner=preconditioner)
    thread = threading.Thread(target=lambda: found.append(inverse @ b), daemon=True)
    thread.start()
    assert inside.wait(60)
    meanwhile = matrices()
    resumed.set()
    thread.join(60)
    assert error(found[0], solution) <= 1e-12
    assert all(torch.equal(meanwhile[name], truth[name]) for name in ALL)
