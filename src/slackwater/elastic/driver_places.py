"""Hosts of a program, and places of its executors, as its driver knows them."""

from dataclasses import dataclass, field

from slackwater.schemas.elastic import Order


@dataclass(slots=True)
class KnownHost:
    """A host that is connected."""

    ready: bool = False
    """It has said what it holds."""
    leaving: bool = False
    """It was asked to end: it gets no executor."""
    over: bool = False
    """It was told to end."""


@dataclass(slots=True)
class Place:
    """Where an executor is, and what it is to do."""

    rank: int | None = None
    move: int = 0
    state: int = 0
    """The move under which its state was kept last; 0: it was not."""
    target: int | None = None
    """Where it goes, while its host is asked for it."""
    asked: bool = False
    """Its host is asked for it."""
    parked: tuple[int, int] | None = None
    """Where it is still loaded while it is nowhere, and the move by which it had come."""
    out: dict[int, Order] = field(default_factory=dict)
    """Its orders that are not complete, by their number."""
    _last: int | None = None
    """Where it was last; None: nowhere, or that is not known."""

    def comes_to(self, rank: int | None) -> bool:
        """Note that it goes there. Says whether it comes from another host."""
        if rank is None:
            return False
        before, self._last = self._last, rank
        return before not in (None, rank)
