"""The squared lengths of one iteration's gradients, of which the gradient noise scale is told."""

from typing import NamedTuple


class GradientSquares(NamedTuple):
    """One iteration's gradients, all of the job's tensors together (Qiao, thesis, appendix A.1)."""

    each_sq: float
    """The mean, over workers, of the squared length of a worker's gradient."""
    mean_sq: float
    """The squared length of the workers' mean gradient."""
    workers: int
    """How many gradients there were: 2 or more."""
