"""Every type of message and record, and where the golden ones of each version are."""

import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import slackwater.schemas
from slackwater.schemas.base import Message, Record

FOLDER: Final = Path(__file__).parent
STORED: Final = frozenset(
    {
        "AggregatorDrain", "AggregatorRecord", "BreachesRecord", "DeviceRecord", "EpochRecord",
        "JobPlacement", "JobRecord", "LeaseRecord", "LenderRecord", "UsageRecord",
    }
)  # fmt: skip
"""The records that are values of a bucket's keys; the others are parts of these and of messages."""

RENAMED: Final = {"PlanTurns": "SlotPlan"}
"""Names that types had in an earlier version. Their tags on the wire are what they were."""


def of(base: type[Message] | type[Record]) -> dict[str, type[Any]]:
    """By name, what derives from `base`."""
    for module in pkgutil.iter_modules(slackwater.schemas.__path__):
        importlib.import_module(f"slackwater.schemas.{module.name}")
    return {
        kind.__name__: kind
        for kind in sorted(_below(base), key=lambda kind: kind.__name__)
        if kind.__module__.startswith("slackwater.schemas.")
    }


def _below(base: type[Any]) -> Iterator[type[Any]]:
    for kind in base.__subclasses__():
        yield kind
        yield from _below(kind)
