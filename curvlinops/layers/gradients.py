"""Gradients of the samples of a batch, by layers' rules where these are known."""

from collections.abc import Callable, Collection, Iterator
from functools import cached_property

from torch import Tensor

from curvlinops.autodiff.backward import Problem, transposed_jacobian
from curvlinops.layers.batch import RecordedBatch
from curvlinops.layers.forms import BYTES, PerSampleGradient
from curvlinops.layers.groups import Group
from curvlinops.layers.parts import Part
from curvlinops.layers.shares import Shares


class SampleGradients:
    """Gradients of the samples of a batch.

    Args:
        problem: The model on the batch.
        batch: What the rules know of it, ``None`` for nothing.
        fallbacks: Why parameters are treated sample by sample.
        ways: How these are, see ``Shares``.

    Attributes:
        output: The model's output.
        num_samples: N.
        fallbacks: Why parameters are treated sample by sample.
    """

    def __init__(
        self,
        problem: Problem,
        batch: RecordedBatch | None,
        fallbacks: dict[str, str],
        ways: dict[str, bool],
    ):
        self._problem, self._batch, self._ways = problem, batch, ways
        self.fallbacks = dict(fallbacks)
        self._known = [] if batch is None else batch.names
        if len(self._known) < len(problem.space.names):
            self.output = self._whole[1]
            if batch is None and len(self.output):  # else it was checked before it was sorted
                problem.check(self.output)
        else:
            self.output = batch.output.detach()
        self.num_samples = len(self.output) if batch is None else batch.num_samples

    @cached_property
    def _whole(self) -> tuple[Callable, Tensor]:
        return transposed_jacobian(self._problem)

    @property
    def vectors_at_once(self) -> int:
        """How many vectors should be backpropagated at once."""
        size = self.output.nbytes if self._batch is None else self._batch.num_bytes
        return max(BYTES // max(size, 1), 1)

    def parts(self, u: Tensor, last: bool = False) -> Iterator[Part]:
        """Yield the gradients of layers' uses of parameters, one by one.

        Args:
            u: What is backpropagated, ``[V, *output]``.
            last: Whether nothing is backpropagated later: memory is given back on the way.
        """
        if self._batch is None:
            return iter(())
        return self._batch.parts(self._batch.gradients(u, last))

    def backward(self, u: Tensor, last: bool = False) -> list[Group]:
        """Backpropagate vectors; a sample's gradient is that of its own share.

        Args:
            u: See ``parts``.
            last: See ``parts``.
        """
        known: dict[str, PerSampleGradient] = {}
        if self._batch is not None:
            known = self._batch.forms(self._batch.gradients(u, last), len(u))
        groups: list[Group] = [([name], form) for name, form in known.items()]
        return groups + self.rest(u)

    def rest(self, u: Tensor) -> list[Group]:
        """Backpropagate vectors ``[V, *output]`` to the parameters that ``parts`` does not know."""
        return self.one_by_one(u, {*self._problem.space.names}.difference(self._known))

    def one_by_one(self, u: Tensor, names: Collection[str]) -> list[Group]:
        """Backpropagate vectors ``[V, *output]`` to some parameters, sample by sample."""
        names = [name for name in self._problem.space.names if name in names]
        if not names:
            return []
        apply, output = self._whole
        return [Shares(self._problem, apply, output, names, self._ways).group(u)]
