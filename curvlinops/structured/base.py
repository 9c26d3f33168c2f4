"""The methods of all matrices with structure."""

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import matmul
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from curvlinops.linear_operator.operator import Combined, PowerLinearOperator, TorchLinearOperator
from curvlinops.linear_operator.space import ParameterSpace, by_name
from curvlinops.structured.factor import Factor
from curvlinops.structured.linalg import signed_logarithm
from curvlinops.support.arguments import MAPPINGS, as_device, check_count, check_number
from curvlinops.support.files import pack, write
from curvlinops.support.rng import read_generator
from curvlinops.support.torch_modes import in_default_modes


class StructuredLinearOperator(TorchLinearOperator):
    """A matrix whose structure makes more than products cheap.

    Multiples, sums with multiples of the identity, inverses and powers have structure, too. So do
    sums and products of two operators, if their classes say so (``_added``, ``_multiplied``).
    Operators never change: results are new operators, which share tensors with the old ones.
    Tensors are kept, not copied; do not change them in place.

    A subclass implements ``_apply``, the methods with an underscore that it has, and ``_record``.
    """

    T: "StructuredLinearOperator"
    H: "StructuredLinearOperator"
    __mul__: Combined["StructuredLinearOperator"]
    __rmul__: Combined["StructuredLinearOperator"]

    def __init__(
        self,
        domain: ParameterSpace,
        self_adjoint: bool = True,
        codomain: ParameterSpace | None = None,
    ):
        super().__init__(domain, codomain, self_adjoint)
        self._decomposition: StructuredLinearOperator | None = None
        self._made_parts: Sequence[StructuredLinearOperator] | None = None

    # --- quantities

    @in_default_modes
    def trace(self) -> Tensor:
        """Return the sum of the diagonal, a scalar."""
        return self._trace()

    @in_default_modes
    def frobenius_norm(self) -> Tensor:
        """Return the root of the sum of all squared entries, a scalar."""
        return self._norm().to(self.torch_dtype)

    @in_default_modes
    def diagonal(self) -> Tensor:
        """Return the diagonal, ``[D]``."""
        return self.domain.vectors(self._diagonal())

    @in_default_modes
    def det(self) -> Tensor:
        """Return the determinant, a scalar.

        It over- and underflows easily; ``logdet`` does not.
        """
        sign, logarithm = self._slogdet()
        return sign * logarithm.exp()

    @in_default_modes
    def logdet(self) -> Tensor:
        """Return the logarithm of the determinant, a scalar.

        It is -inf where ``inverse`` raises: if the operator is singular to working precision.

        Raises:
            ValueError: If the determinant is negative.
        """
        sign, logarithm = self._slogdet()
        if bool(sign < 0):
            raise ValueError("The determinant is negative, so that it has no real logarithm.")
        return logarithm

    @in_default_modes
    def eigvalsh(self) -> Tensor:
        """Return all eigenvalues in ascending order, ``[D]``.

        Raises:
            ValueError: If the operator is not symmetric.
        """
        return self.eigh().eigenvalues.sort().values

    # --- functions of the operator

    @in_default_modes
    def damped(self, delta: float | Tensor | Mapping[Any, Any]) -> "StructuredLinearOperator":
        """Return the sum with a multiple of the identity, or with a number for each parameter.

        Args:
            delta: The number that is added to the diagonal; or numbers by the names of parameters,
                of modules, globs, or tuples of these, as in ``{"*": 0.1, "head": 10.0}``. The key
                that names the fewest parameters counts. Those of one block, such as a weight and
                its bias, need one number. Tensors that require gradients are taken: ``logdet`` is
                differentiable in them, and there are no products.

        Raises:
            ValueError: If a number is not finite or missing, a name is unknown, or a block has two.
        """
        if self.shape[0] != self.shape[1]:
            raise ValueError(f"Only square operators can be damped, got shape {self.shape}.")
        given = delta if isinstance(delta, MAPPINGS) else {"*": delta}
        followed = {}
        if torch.is_grad_enabled():
            followed = {key: x for key, x in given.items() if getattr(x, "requires_grad", False)}
        with torch.no_grad():
            plain = {key: check_number("delta", x) for key, x in given.items()}
        numbers = by_name(plain | followed, self.domain.names, "delta")
        if missing := [name for name in self.domain.names if name not in numbers]:
            raise ValueError(f"delta has no number for {missing}; for the rest, add {{'*': 0.0}}.")
        return DampedLinearOperator(self, numbers) if followed else self._shifted_by(numbers)

    @in_default_modes
    def eigh(self) -> "StructuredLinearOperator":
        """Return the eigendecomposition, an ``EighDecomposedLinearOperator``.

        It is computed once and kept. The eigenvalues are in no particular order. Those that are
        only rounding errors are zero.

        Raises:
            ValueError: If the operator is not symmetric.
        """
        self._need_symmetry("An eigendecomposition")
        if self._decomposition is None:
            self._decomposition = self._eigh()
        return self._decomposition

    @in_default_modes
    def inverse(
        self, damping: float = 0.0, retry_double_precision: bool = True
    ) -> "StructuredLinearOperator":
        """Return ``(A + damping I)^-1``, exactly.

        Args:
            damping: The number that is added to the diagonal.
            retry_double_precision: Whether a matrix that cannot be factorized accurately in float32
                is factorized in float64. The result is float32 in any case.

        Raises:
            ValueError: If the operator is not symmetric, or singular to working precision.
        """
        self._need_symmetry("An inverse")
        damping = check_number("damping", damping)
        operator = self._shifted(damping) if damping else self
        return operator._inverse(retry_double_precision)

    def solve(self, b: Any) -> Any:
        """Return the solution x of ``A x = b``, the same as ``A.inverse() @ b``.

        The inverse is not kept; for several calls keep ``A.inverse()``.

        Args:
            b: One or several vectors, of any kind that ``A @ b`` takes.

        Raises:
            ValueError: If the operator is not symmetric, or singular to working precision.
        """
        return self.inverse() @ b

    @in_default_modes
    def power(self, exponent: float) -> TorchLinearOperator:
        """Return ``A^exponent``; the same as ``A ** exponent``.

        Args:
            exponent: Any real number. Negative exponents need a nonsingular operator. Exponents
                that are not integers need a positive semidefinite operator, and a Kronecker product
                needs positive semidefinite factors. All exponents but non-negative integers need a
                symmetric operator.

        Raises:
            ValueError: If there is no such power.
        """
        exponent = check_number("exponent", exponent)
        if not self.self_adjoint and exponent.is_integer() and exponent >= 0:
            times = int(exponent)
            return reduce(matmul, [self] * times) if times else PowerLinearOperator(self, 0)
        self._need_symmetry("A power")
        return self._power(exponent)

    @in_default_modes
    def sample(
        self,
        generator: torch.Generator | None = None,
        num_samples: int | None = None,
        seed: int | None = None,
    ) -> Tensor:
        """Draw from the normal distribution with mean zero and this operator as covariance.

        Args:
            generator: Source of randomness; see ``hutchinson_trace``.
            num_samples: The number of draws, ``[D, num_samples]``. Default: a single draw, ``[D]``.
            seed: Seeds a generator; see ``hutchinson_trace``.

        Raises:
            ValueError: If the operator is not positive semidefinite.
        """
        num = 1 if num_samples is None else check_count("num_samples", num_samples, at_least=0)
        generator = read_generator(self.device, seed, generator)
        z = self.domain.draw(num, lambda x: x.normal_(generator=generator))
        draws = self._multiply_root(z)
        return self.domain.vectors(draws[0] if num_samples is None else draws.T)

    # --- files and devices

    @in_default_modes
    def state_dict(self) -> dict[str, Any]:
        """Return the contents of the operator: tensors by name, and metadata as a string.

        ``load`` makes an operator of it. Do not write to the tensors: they are the operator's own.

        Raises:
            NotImplementedError: If the operator, or a part of it, is of a class of your own.
        """
        return pack(self)

    def save(self, path: str | Path) -> None:
        """Write the operator to a safetensors file, which ``load`` reads."""
        write(self.state_dict(), path)

    def to_device(self, device: torch.device | str) -> "StructuredLinearOperator":
        """Return the operator on another device; itself if it is there already."""
        device = as_device(device)
        return self if device == self.device else self._to(device, self.torch_dtype)

    # --- algebra: what linear_operator/operator.py asks

    _has_structure = True

    @in_default_modes
    def _plus(self, other: TorchLinearOperator) -> TorchLinearOperator | None:
        if not other._has_structure or self.shape != other.shape:
            return None
        other = other._structured()
        self.domain.check_compatible(other.domain)
        # of two spaces that agree, keep the one that has parameter structure
        left, right = sorted(self._promoted(other), key=lambda operator: operator.domain.is_flat)
        total = left._added(right)
        return right._added(left) if total is None else total

    @in_default_modes
    def _times(self, other: TorchLinearOperator) -> TorchLinearOperator | None:
        if not other._has_structure or self.shape[1] != other.shape[0]:
            return None
        other = other._structured()
        self.domain.check_compatible(other.codomain)
        left, right = self._promoted(other)
        if right._multiple is not None:
            return left._scaled(right._multiple)
        return left._multiplied(right)

    def _promoted(
        self, other: "StructuredLinearOperator"
    ) -> "tuple[StructuredLinearOperator, StructuredLinearOperator]":
        """Return both operators in their common dtype."""
        dtype = torch.promote_types(self.torch_dtype, other.torch_dtype)
        return self._cast(dtype), other._cast(dtype)

    def _cast(self, dtype: torch.dtype) -> "StructuredLinearOperator":
        return self if self.torch_dtype == dtype else self._to(self.device, dtype)

    @in_default_modes
    def _eigenpairs(self, k: int, which: str) -> tuple[Tensor, Tensor] | None:
        """Return k eigenpairs as ``eigsh``, ``None`` if that takes that of a large matrix."""
        if not self._has_eigh():
            return None
        decomposition = self.eigh()
        values, order = decomposition.eigenvalues.sort()
        if which == "LM":
            chosen = values.abs().argsort(descending=True)[:k].sort().values
        else:
            from_below = {"LA": 0, "SA": k, "BE": k // 2}[which]
            ranks = torch.arange(len(values), device=self.device)
            chosen = torch.cat([ranks[:from_below], ranks[len(values) - k + from_below :]])
        units = torch.zeros(len(values), k, dtype=self.torch_dtype, device=self.device)
        units[order[chosen], torch.arange(k, device=self.device)] = 1.0
        return values[chosen], decomposition.eigenvectors @ units

    def __pow__(self, exponent: Any) -> TorchLinearOperator:
        return self.power(exponent)

    # --- what a subclass implements

    #: The number c if the operator is c times the identity.
    _multiple: float | None = None

    def _parts(self, number: int) -> "Sequence[StructuredLinearOperator]":
        """Return the operator as so many equally large diagonal blocks.

        They are made once, so that operators that share something share its parts.
        """
        if number > 1 and self._made_parts is None:
            self._made_parts = self._make_parts(number)
        return [self] if number == 1 else self._made_parts

    def _make_parts(self, number: int) -> "Sequence[StructuredLinearOperator]":
        raise self._lacks("equal diagonal blocks")

    def _trace(self) -> Tensor:
        """Return the trace, a scalar."""
        return self._diagonal().sum()

    def _norm(self) -> Tensor:
        """Return the Frobenius norm, a scalar, perhaps in float64."""
        raise self._lacks("Frobenius norm")

    def _diagonal(self) -> Tensor:
        """Return the diagonal as a new tensor, ``[D]``."""
        raise self._lacks("diagonal")

    def _scaled(self, scalar: float) -> "StructuredLinearOperator":
        """Return ``scalar A``."""
        raise self._lacks("multiple")

    def _shifted(self, scalar: float) -> "StructuredLinearOperator":
        """Return ``A + scalar I``."""
        raise self._lacks("sum with the identity")

    def _shifted_by(self, numbers: Mapping[str, Any]) -> "StructuredLinearOperator":
        """Return the sum with a number for each parameter."""
        different = set(numbers.values())  # tensors are equal if they are the same
        if len(different) > 1:
            raise ValueError(
                f"{', '.join(map(repr, numbers))} have one block, which needs one number, got "
                f"{[*numbers.values()]}. Name them by one key: their module, or a tuple of names."
            )
        return self._shifted(float(different.pop()))

    def _added(self, other: "StructuredLinearOperator") -> "StructuredLinearOperator | None":
        """Return the sum with another operator if that has structure, else None."""
        return None

    def _multiplied(self, other: "StructuredLinearOperator") -> "StructuredLinearOperator | None":
        """Return the product with another operator if that has structure, else None."""
        return None

    def _transposed(self) -> "StructuredLinearOperator":
        """Return the adjoint; asked only if the operator is not self-adjoint."""
        raise self._lacks("adjoint")

    def _slogdet(self) -> tuple[Tensor, Tensor]:
        """Return the sign of the determinant, and the logarithm of its absolute value.

        The sign is zero where ``_inverse`` raises.
        """
        return signed_logarithm(self._eigh(accurate=True).eigenvalues)

    def _multiply_root(self, columns: Tensor) -> Tensor:
        """Multiply by a matrix R with ``R R^T`` equal to the operator."""
        return self.eigh()._multiply_root(columns)

    def _eigh(self, accurate: bool = False) -> "StructuredLinearOperator":
        """Return the eigendecomposition, with zeros for eigenvalues that are rounding errors.

        If small eigenvalues matter, it is ``accurate``: matrices in float32 are decomposed in
        float64, unless damping makes that unnecessary.
        """
        raise self._lacks("eigendecomposition")

    def _has_eigh(self) -> bool:
        """Return whether an eigendecomposition takes little more than those of small matrices."""
        return self.self_adjoint

    def _inverse(self, accurate: bool = True) -> "StructuredLinearOperator":
        """Return the inverse; if ``accurate``, in float64 where float32 does not suffice."""
        return self._eigh(accurate)._power(-1.0)

    def _power(self, exponent: float) -> "StructuredLinearOperator":
        """Return a power."""
        return self._eigh(accurate=True)._power(exponent)

    def _as_factors(self) -> list[Factor] | None:
        """Return the factors of the Kronecker product that the operator is, if it is one."""
        return None

    def _squared_entries(self) -> "StructuredLinearOperator":
        """Return the matrix of the squared entries."""
        raise self._lacks("matrix of squares")

    def _to(self, device: torch.device, dtype: torch.dtype) -> "StructuredLinearOperator":
        """Return the operator on another device, or in another dtype."""
        raise self._lacks("copy elsewhere")

    def _need_symmetry(self, what: str) -> None:
        if not self.self_adjoint:
            raise ValueError(f"{what} needs a symmetric operator, this {self._name} is not.")

    def _lacks(self, what: str) -> NotImplementedError:
        return NotImplementedError(f"{self._name} has no {what}.")

    @property
    def _name(self) -> str:
        return type(self).__name__


class DampedLinearOperator(StructuredLinearOperator):
    """The sum with a number for each parameter. Its determinant is differentiable in these."""

    def __init__(self, operator: StructuredLinearOperator, numbers: Mapping[str, Any]):
        with torch.no_grad():
            self._sum, self._numbers = operator._shifted_by(numbers), numbers
        super().__init__(operator.domain, operator.self_adjoint)

    def _slogdet(self) -> tuple[Tensor, Tensor]:
        self._need_symmetry("A determinant")
        # those of a block have the places of its entries
        sums = self.domain.split(self._sum._eigh(accurate=True).eigenvalues)
        for name, number in self._numbers.items():
            if isinstance(number, Tensor):
                number = number.reshape(()).to(sums[name])
                sums[name] = sums[name] + (number - number.detach())
        return signed_logarithm(self.domain.join(sums))

    def _apply(self, columns: Tensor) -> Tensor:
        raise self._lacks("products")

    def _lacks(self, what: str) -> NotImplementedError:
        return NotImplementedError(
            f"The damping requires gradients: the operator has logdet() and det(), but no {what}. "
            "For everything else pass numbers .detach(), or use torch.no_grad()."
        )
