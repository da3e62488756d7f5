"""Which tensors share a bucket: the task of the assignment scheme.

A tensor is the paper's unit of placement (section 2.2). Tensors below `BUCKET_BYTES` share a bucket
with their neighbours: a region, a doorbell and a cyclic slot each cost more than such a tensor's
aggregation, and neighbours become ready together in the backward pass, so nothing waits for long.
The layout depends on the tensors alone, so that every restart finds the same one.
"""

from math import prod
from typing import Final

from slackwater.common.limits import BUCKET_BYTES
from slackwater.schemas.jobs import TensorSpec
from slackwater.schemas.placement import BucketLayout

PARAMETER_BYTES: Final = 4
"""Parameters are float32 whatever the gradients' dtype."""


def lay_out(
    tensors: tuple[TensorSpec, ...], bucket_bytes: int = BUCKET_BYTES
) -> tuple[BucketLayout, ...]:
    """Every tensor is in exactly one bucket, in order; a bucket of several tensors has at most
    `bucket_bytes`, a larger tensor has one of its own."""
    buckets: list[BucketLayout] = []
    first = count = elements = 0
    for position, tensor in enumerate(tensors):
        size = prod(tensor.shape)
        if count and (elements + size) * PARAMETER_BYTES > bucket_bytes:
            buckets.append(
                BucketLayout(index=len(buckets), first=first, count=count, elements=elements)
            )
            count = elements = 0
        if count == 0:
            first = position
        count += 1
        elements += size
    if count:
        buckets.append(
            BucketLayout(index=len(buckets), first=first, count=count, elements=elements)
        )
    return tuple(buckets)
