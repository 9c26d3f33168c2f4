"""Inputs and output gradients of layers, for approximations that users build of them."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor

from curvlinops.layers.factors import FactoredGradient
from curvlinops.layers.samples import SampleGradients
from curvlinops.operators.kfac.estimate import backpropagated
from curvlinops.operators.kfac.options import Options
from curvlinops.operators.vectors import mark_last
from curvlinops.risk.batch_problem import BatchProblem


@dataclass(frozen=True, eq=False)
class CapturedLayer:
    """The inputs and output gradients of a layer's product with a weight, on a batch.

    For vector v and sample n, ``sum_s gradients[v, n, s] inputs[n, s]^T`` is the gradient of the
    layer's matrix ``[O, I]``. The weight may have another order, such as ``[I, O]``:
    ``weight_gradients`` returns its gradients as they are stored. That of the bias is
    ``sum_s gradients[v, n, s]``. With several groups, all tensors have an axis of G groups before
    the last axis. They may share memory with the data: do not write to them.

    Attributes:
        weight: The name of the weight.
        bias: The name of the bias that is added to the product, ``None`` if there is none.
        inputs: The inputs, ``[N, S, I]``, at S positions of N samples. Of convolutions these are
            patches, of embeddings rows of the identity matrix. Padding is among them.
        gradients: V backpropagated vectors at the output, ``[V, N, S, O]``.
        batch: The number of the batch.
        chunk: The number of the batch's chunk of vectors. Inputs are the same in each chunk.
    """

    weight: str
    bias: str | None
    inputs: Tensor
    gradients: Tensor
    batch: int
    chunk: int
    _gradient: FactoredGradient = field(repr=False)

    def weight_gradients(self) -> Tensor:
        """Return the gradients of the weight through this layer.

        Uses of one weight have the same shape, and may be added up.

        Returns:
            A tensor ``[V, N, *weight]``. Entries that the layer does not use are zero.
        """
        return self._gradient.rows(slice(None))


def captured_layers(
    problem: BatchProblem, samples: SampleGradients, options: Options
) -> Iterator[CapturedLayer]:
    """Yield the layers of a batch; it must be known which positions belong to which sample."""
    for chunk, (u, last) in enumerate(mark_last(backpropagated(problem, samples, options))):
        arrived = samples.arrive(u, last)
        biases = {use.call: use.name for use in samples.uses if use.use.joins_weight}
        for use in samples.uses:
            gradient = arrived.take(use, by_position=True)
            if use.use.is_bias or not isinstance(gradient, FactoredGradient):
                continue
            if use.samples is None:
                raise ValueError(
                    "It is not known to which samples the rows of the layer of "
                    f"'{use.name}' belong. Leave it out of params."
                )
            inputs, gradients = gradient.inputs(), gradient.output_gradients()
            if inputs.shape[2] == 1:
                inputs, gradients = inputs.squeeze(2), gradients.squeeze(3)
            bias = biases.get(use.call)
            where = problem.batch.index, chunk
            yield CapturedLayer(use.name, bias, inputs, gradients, *where, gradient)
