"""Simulated services publish and listen to what their users of the bus may, and to nothing else."""

from slackwater.common.bus.memory import MemoryBus
from slackwater.common.shell.world import World
from slackwater.schemas.permissions import SERVICES, Service, of_service

HELD: list[MemoryBus] = []
"""Buses of services that were started since somebody looked."""


def hold_to(world: World, service: str, id: str) -> None:
    """Let the service do what its user may. Other services than the product's do as they like."""
    if service in SERVICES:
        assert isinstance(world.bus, MemoryBus)
        world.bus.hold_to(of_service(as_service(service), id))
        HELD.append(world.bus)


def as_service(name: str) -> Service:
    return next(each for each in SERVICES if each == name)


def check_held() -> None:
    """Check that no service tried more than that."""
    buses, HELD[:] = list(HELD), []
    assert not [bus.name for bus in buses if bus.counters.forbidden]
