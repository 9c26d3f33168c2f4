"""The dot test, which checks an adjoint."""

import torch

from curvlinops.algorithms.as_operator import AnyMatrix, Matrix
from curvlinops.support.arguments import check_count
from curvlinops.support.rng import read_generator
from curvlinops.support.torch_modes import in_default_modes


@in_default_modes
def dottest(
    A: AnyMatrix,
    num_tests: int = 3,
    rtol: float | None = None,
    *,
    seed: int | None = None,
    generator: torch.Generator | None = None,
) -> float:
    """Check ``<u, A v> = <A^T u, v>`` for random vectors (Claerbout, 1992).

    Args:
        A: An operator or matrix of any kind.
        num_tests: Number of pairs of random vectors.
        rtol: Largest difference, relative to ``||u|| ||A v|| + ||A^T u|| ||v||``. Default: 1e-4 in
            single, 1e-10 in double precision. For models in half precision, pass 1e-2.
        seed: Seed of the vectors. Default: one drawn from PyTorch's global generator.
        generator: Generator that draws the vectors, instead of ``seed``.

    Returns:
        The largest relative difference.

    Raises:
        ValueError: If the difference exceeds ``rtol``.
    """
    matrix = Matrix(A)
    num_tests = check_count("num_tests", num_tests)
    rng = read_generator(matrix.device, seed, generator)
    rtol = rtol if rtol is not None else (1e-10 if matrix.dtype == torch.float64 else 1e-4)
    domain, codomain = matrix.operator.domain, matrix.operator.codomain
    u, v = (
        space.draw(num_tests, lambda x: x.normal_(generator=rng)).T for space in (codomain, domain)
    )
    Av, Atu = (matrix @ v).double(), matrix.adjoint_matmul(u).double()
    u, v = u.double(), v.double()
    size = codomain.norms(u.T) * codomain.norms(Av.T) + domain.norms(Atu.T) * domain.norms(v.T)
    difference = (codomain.dots(u.T, Av.T) - domain.dots(Atu.T, v.T)).abs()
    worst = float((difference / size.where(size > 0, 1.0)).max())
    if worst > rtol:
        raise ValueError(
            f"<u, A v> and <A^T u, v> differ by {worst:.1e}, relative to the vectors' norms: the "
            "adjoint is not that of the operator, or one of them is not linear."
        )
    return worst
