"""Whether a service takes in what is new, by what it hears of the bus servers' disks."""

import pytest

from slackwater.common.base import codec
from slackwater.common.base.clock import LiveClock
from slackwater.common.bus.base import Delivery
from slackwater.common.shell.store_health import StoreHealth
from slackwater.schemas.service import BusState

MIB = 2**20


async def heard(replicas: int, free: dict[str, int]) -> StoreHealth:
    health = StoreHealth(LiveClock(), {}, replicas)
    for server, mib in free.items():
        state = BusState(server=server, free_bytes=mib * MIB, total_bytes=256 * MIB, at_s=0.0)
        await health.hear(Delivery(f"sw.v1.tel.bus.{server}.state", codec.encode(state), False))
    return health


@pytest.mark.parametrize(
    ("replicas", "free", "refused"),
    [
        (1, {"n1": 200}, False),
        (1, {"n1": 5}, True),
        (3, {"n1": 5, "n2": 200, "n3": 200}, False),
        (3, {"n1": 5, "n2": 5, "n3": 200}, True),
        (5, {"n1": 5, "n2": 5, "n3": 200, "n4": 200, "n5": 200}, False),
        (5, {"n1": 5, "n2": 5, "n3": 5, "n4": 200, "n5": 200}, True),
    ],
)
async def test_nothing_new_is_taken_once_most_disks_are_full(
    replicas: int, free: dict[str, int], refused: bool
) -> None:
    """One full disk of three refused all new jobs, although two servers keep a record safely."""
    health = await heard(replicas, free)
    assert bool(health.why_not(full=True)) is refused
    assert health.why_not(full=False) == ""


async def test_the_full_disk_is_named() -> None:
    health = await heard(1, {"n1": 5})
    assert health.why_not(full=True) == (
        "takes no new jobs: the disk of bus server n1 has 5 MiB left of 256, and 25 are kept for "
        "those that are there: make room"
    )
