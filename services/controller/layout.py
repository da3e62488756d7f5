"""Which tensors share a bucket: the data plane's own plan, so that the two can never differ."""

from slackwater.common.slots.layout import plan_buckets as lay_out

__all__ = ["lay_out"]
