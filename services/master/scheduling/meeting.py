"""Jobs that meet on machines: directly, or by others that they meet. Pure."""

from collections.abc import Collection, Hashable, Mapping
from typing import TypeVar

J = TypeVar("J", bound=Hashable)
M = TypeVar("M", bound=Hashable)


def meeting(places: Mapping[J, Collection[M]]) -> list[tuple[set[J], set[M]]]:
    """Return sets of jobs that meet, each with the machines of its jobs. `places`: job -> its
    machines."""
    found: list[tuple[set[J], set[M]]] = []
    for job, machines in places.items():
        met = [each for each in found if each[1].intersection(machines)]
        found = [each for each in found if each not in met]
        jobs = {job}.union(*(each[0] for each in met))
        found.append((jobs, set(machines).union(*(each[1] for each in met))))
    return found
