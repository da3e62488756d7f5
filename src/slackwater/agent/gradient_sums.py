"""The squared lengths of an iteration's gradients, from the sums that each bucket's region has."""

from collections.abc import Sequence
from math import fsum

from slackwater.agent.worker_bucket import WorkerBucket
from slackwater.common.domains.models.gradient_noise import GradientSquares


def add_squares(buckets: Sequence[WorkerBucket], version: int) -> GradientSquares | None:
    """Add up the squared lengths of all buckets' gradients of a version; None where one does not
    know them."""
    found = [bucket.source.squares(version) for bucket in buckets if bucket.source is not None]
    known = [each for each in found if each is not None and each.workers > 1]
    workers = {each.workers for each in known}
    if len(known) < len(buckets) or len(workers) != 1:
        return None
    count = workers.pop()
    each_sq = fsum(each.each for each in known) / count
    return GradientSquares(each_sq, fsum(each.mean for each in known), count)
