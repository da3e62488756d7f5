"""Containers on machines, and how much memory each wants when: the workload of the cluster
experiment.

Gu, dissertation, 2.7.5: about 90 containers on 32 machines of 64 GB, the same number of each
application (Spark left out, as its 50 % configuration does not run), half of them with all the
memory they want, close to 30 % with 75 % and the rest with 50 % of it, placed at random and started
at once. Peaks are those of 2.7.3. How memory grows is told in 2.7.1 in words; `ramp_s` and `early`
follow them where a number is given (memcached stops allocating after 120 s, 2.7.4.2), the others
are ours, as is `writes` (for ETC and SYS their share of SETs).
"""

from collections.abc import Sequence
from random import Random
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from slackwater.common.base.errors import Rejected

GIB: Final = 1024**3
Floats = NDArray[np.float64]


class Application(NamedTuple):
    name: str
    peak_gib: float
    ramp_s: float
    """Until `early` of the peak is reached; the rest comes evenly until the end."""
    early: float
    writes: float
    """Share of touches that change the page."""


APPLICATIONS: Final = (
    Application("voltdb", 11.5, 300.0, 1.0, 0.5),
    Application("memcached-etc", 9.0, 120.0, 1.0, 0.05),
    Application("memcached-sys", 14.5, 120.0, 0.8, 0.25),
    Application("powergraph", 9.0, 60.0, 1.0, 0.3),
    Application("graphx", 12.0, 100.0, 1.0, 0.3),
)
CONFIGURATIONS: Final = ((1.0, 0.5), (0.75, 0.3), (0.5, 0.2))
"""(share of the peak that the container may hold, share of the containers)"""
PER_MACHINE: Final = 90 / 32


class Container(NamedTuple):
    application: Application
    share: float
    """The share of the peak that it may hold in memory."""
    machine: int

    @property
    def limit_bytes(self) -> float:
        return self.share * self.application.peak_gib * GIB


def place(
    machines: int, count: int, memory_bytes: int, system_bytes: int, rng: Random
) -> list[Container]:
    """Each on a machine drawn from those whose containers' limits leave it room. Raises Rejected
    where one has no room anywhere."""
    room = [float(memory_bytes - system_bytes)] * machines
    placed = []
    chosen = [(APPLICATIONS[n % len(APPLICATIONS)], share) for n, share in _shares(count)]
    rng.shuffle(chosen)
    for application, share in chosen:
        wanted = share * application.peak_gib * GIB
        able = [m for m in range(machines) if room[m] >= wanted]
        if not able:
            raise Rejected(
                f"{count} containers do not fit {machines} machines: {application.name} wants "
                f"{wanted / GIB:.1f} GiB and no machine has that left; take more --nodes"
            )
        machine = rng.choice(able)
        room[machine] -= wanted
        placed.append(Container(application, share, machine))
    return placed


def _shares(count: int) -> list[tuple[int, float]]:
    """(number, share of its peak): each application has the same mix of configurations."""
    kinds = len(APPLICATIONS)
    found = []
    for number in range(count):
        at = (number // kinds + 0.5) / max(1.0, count / kinds)
        share = CONFIGURATIONS[-1][0]
        total = 0.0
        for held, part in CONFIGURATIONS:
            total += part
            if at < total:
                share = held
                break
        found.append((number, share))
    return found


def wanted_bytes(containers: Sequence[Container], at_s: float, end_s: float) -> Floats:
    """Return the bytes that each would hold, were its memory not limited."""
    peak = np.array([c.application.peak_gib * GIB for c in containers])
    ramp_s = np.array([c.application.ramp_s for c in containers])
    early = np.array([c.application.early for c in containers])
    rest_s = np.maximum(end_s - ramp_s, 1.0)
    share = np.where(
        at_s < ramp_s,
        early * at_s / ramp_s,
        early + (1.0 - early) * np.minimum((at_s - ramp_s) / rest_s, 1.0),
    )
    return np.asarray(peak * share)
