"""Kronecker-factored approximate curvature."""

from curvlinops.operators.kronecker.base import KroneckerFactoredLinearOperator
from curvlinops.operators.kronecker.blocks import (
    BlockFactors,
    Blocks,
    assemble,
    operator_of,
    summed,
)
from curvlinops.operators.kronecker.inverse import Damping, inverse_builder
from curvlinops.structured.base import StructuredLinearOperator


class KFACLinearOperator(KroneckerFactoredLinearOperator):
    """Kronecker-factored approximate curvature (KFAC), block-diagonal with a block for each layer.

    The GGN's block of a weight ``[out, in]`` is approximated by ``B (x) A``, with the second
    moments of the layer's inputs a and output gradients g (those of l_t, without c) over positions
    that share the weight: ``A = mean a a^T`` and ``B = c * sum g g^T`` in the expand setting,
    see ``curvlinops.layers.factors`` for the reduce setting. Biases have A = 1. A weight that is
    used several times has one pair of moments over all its uses. Embeddings have a diagonal A.
    Convolutions with several groups have a pair of factors for each group. Normalization layers and
    other parameters that are added, or multiplied elementwise, have their exact block; those with
    several axes and more than 4096 entries, such as position embeddings, one for each vector along
    the last axis.

    Martens and Grosse, Optimizing neural networks with Kronecker-factored approximate curvature,
    ICML 2015; Grosse and Martens, A Kronecker-factored approximate Fisher matrix for convolution
    layers, ICML 2016; Eschenhagen et al., Kronecker-factored approximate curvature for modern
    neural network architectures, NeurIPS 2023.

    For arguments and errors see ``KroneckerFactoredLinearOperator``.
    """

    def _block(self, factors: BlockFactors) -> StructuredLinearOperator:
        return operator_of(factors, self.space)

    def _inverse_blocks(self, damping: Damping) -> Blocks:
        if not damping.exact:
            factors = self._block_factors()
            return assemble(factors, self.space, inverse_builder(factors, damping, self.space))
        # the structure keeps the eigendecompositions for other dampings
        structure = self.structure
        for block, products, _ in self._block_factors():
            if damping.of_gradients and len(products) > 1 and not summed(products).can_be_written:
                raise ValueError(
                    f"Block {', '.join(block.names)!r} is a sum of Kronecker products, too large "
                    "for exact damping. Use inverse(damping), which damps the factors of each of "
                    "them; or leave the parameter out of params; or choose a smaller "
                    "max_factor_size, above which factors are diagonal."
                )
        return structure.inverse(damping.of_gradients, damping.retry_double_precision).blocks
