"""Messages between a worker service and the process that watches its jobs' traffic: JSON lines."""

import msgspec

from slackwater.schemas.traffic import JobTraffic


class Target(msgspec.Struct, frozen=True):
    """A rank to watch."""

    key: str
    pids: frozenset[int]
    ports: frozenset[int]
    workers: int


class Orders(msgspec.Struct, frozen=True):
    targets: tuple[Target, ...] = ()


class Able(msgspec.Struct, frozen=True):
    """Why packets and calls cannot be watched; empty: they can."""

    packets: str = ""
    calls: str = ""


class Finding(msgspec.Struct, frozen=True):
    key: str
    traffic: JobTraffic
    cpu_percent: float = 0.0
