"""The phases of a job on its cluster, and how an aggregator is heard: which may follow which.

    waiting --> hosting --> profiling --> steady --> moving --> steady | profiling
                   ^            |           |           |
                   +------------+-----------+-----------+   lost buckets begin anew elsewhere

A job that is profiled on aggregators where it may stay becomes steady without moving. Any job may
be released; a new run of it is a new record.
"""

from typing import Final, Literal

from slackwater.schemas.placement import Phase

PHASES: Final[dict[Phase, frozenset[Phase]]] = {
    "waiting": frozenset({"hosting", "released"}),
    "hosting": frozenset({"profiling", "steady", "moving", "released"}),
    "profiling": frozenset({"steady", "moving", "hosting", "released"}),
    "moving": frozenset({"profiling", "steady", "hosting", "released"}),
    "steady": frozenset({"moving", "hosting", "released"}),
    "released": frozenset(),
}
"""Phase of a job -> those that may follow it. To remain in one is always possible."""

Presence = Literal["unheard", "alive", "silent", "given_up"]
PRESENCES: Final[dict[Presence, frozenset[Presence]]] = {
    "unheard": frozenset({"alive", "given_up"}),
    "alive": frozenset({"silent", "given_up"}),
    "silent": frozenset({"alive", "given_up"}),
    "given_up": frozenset({"alive"}),
}
"""How an aggregator is heard -> what may follow. `silent`: its heartbeats stopped, and it is waited
for. `given_up`: its supervisor, or an operator, said that it will not come back; if it does, it is
taken again."""
