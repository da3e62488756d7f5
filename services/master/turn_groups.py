"""Choose which jobs that take turns share nodes: Harmony's grouping on a running cluster (Lee 2020,
section 4.3.2).

Pure. Algorithm 2 forms groups out of all that run, and gives each a number of nodes. Here every job
has bounds of its own, some cannot be moved, and nobody is paused to let others run, as slots have
been promised to all of them. So the groups are laid over the present nodes such that few jobs move,
and what comes out is judged by eq. 4.1 to 4.4 on the nodes where jobs then are, for each number of
groups: jobs move if U becomes larger by `gain`, and if that saves more, until the next job
completes, than moving costs.

    jobs that meet on nodes, directly or by others, iterate together:
    T = max(over nodes: the sum of Tcpu, the sum of Tnet; over jobs: Tcpu + Tnet)
    U = sum over nodes (.7 sum Tcpu + .3 sum Tnet) / T / nodes

which are eq. 4.1 and 4.4 where all jobs of a group are on the same nodes.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf
from types import MappingProxyType
from typing import Final, NamedTuple

from slackwater.common.domains.models.group import CPU_WEIGHT, NETWORK_WEIGHT, Subtasks
from slackwater.schemas.base import JobId, NodeId
from slackwater.services.master.scheduling.meeting import meeting
from slackwater.services.master.scheduling.policies.harmony_grouping import groupings

WEIGHTS: Final = (CPU_WEIGHT, NETWORK_WEIGHT)
NEAR: Final = 0.99
"""Among changes that are so near to the best, the one that moves fewest jobs is made."""
Places = Mapping[JobId, tuple[NodeId, ...]]
"""Job -> the nodes of its processes."""


class Member(NamedTuple):
    """A running job that takes turns."""

    job: JobId
    nodes: tuple[NodeId, ...]
    """In the order of its ranks."""
    times: Subtasks
    least: int
    most: int
    """Nodes that it can use."""
    moves: bool = True
    """Its processes can be on any nodes."""
    cost_s: float = 0.0
    """Seconds that it does not train when it moves."""
    left_s: float = inf
    """Seconds until it completes; inf: nobody knows."""
    memory_bytes: int = 0
    """Main memory that each of its processes asks for; 0: it does not say."""


class Regrouping(NamedTuple):
    """Jobs that are to be elsewhere, and the use of all nodes before and after."""

    places: dict[JobId, tuple[NodeId, ...]]
    before: float
    after: float


def use(members: Sequence[Member], places: Places, nodes: int) -> float:
    """Return U, weighted, of all `nodes` with the jobs at these places."""
    times = {member.job: member.times for member in members}
    used = 0.0
    for jobs, _ in meeting(places):
        cpu_s, network_s = defaultdict[NodeId, float](float), defaultdict[NodeId, float](float)
        longest_s = 0.0
        for job in jobs:
            here = places[job]
            computing_s = times[job].cpu_on_s(len(set(here)))
            longest_s = max(longest_s, computing_s + times[job].network_s)
            for node in set(here):
                cpu_s[node] += computing_s
                network_s[node] += times[job].network_s
        iteration_s = max(longest_s, *cpu_s.values(), *network_s.values())
        used += WEIGHTS[0] * sum(cpu_s.values()) / iteration_s
        used += WEIGHTS[1] * sum(network_s.values()) / iteration_s
    return used / nodes


def regroup(
    members: Sequence[Member],
    slots: Mapping[NodeId, int],
    gain: float,
    memory: Mapping[NodeId, int] = MappingProxyType({}),
) -> Regrouping | None:
    """Return what makes U larger by `gain` and pays; None: nothing does. `slots`: of each node that
    is heard, for these jobs; `memory`: bytes of each that says how much it has."""
    now = {member.job: member.nodes for member in members}
    if len(members) < 2 or not slots or any(set(nodes) - slots.keys() for nodes in now.values()):
        return None
    before = use(members, now, len(slots))
    found = []
    for places in _ways(members, sorted(slots)):
        if _hold(members, places, slots, memory):
            moved = {job: nodes for job, nodes in places.items() if set(nodes) != set(now[job])}
            after = use(members, places, len(slots))
            if moved and after >= before * (1.0 + gain):
                found.append(Regrouping(moved, before, after))
    paying = [each for each in found if _pays(members, each, len(slots))]
    best = max((each.after for each in paying), default=0.0)
    near = (each for each in paying if each.after >= NEAR * best)
    return min(near, key=lambda each: len(each.places), default=None)


def _hold(
    members: Sequence[Member],
    places: Places,
    slots: Mapping[NodeId, int],
    memory: Mapping[NodeId, int],
) -> bool:
    """Say whether the nodes have slots and memory for jobs at these places. Memory that is short
    already, where nobody comes, is not of this choice."""
    asked, before = Counter[NodeId](), Counter[NodeId]()
    for member in members:
        for node in places[member.job]:
            asked[node] += member.memory_bytes
        for node in member.nodes:
            before[node] += member.memory_bytes
    return all(count <= slots[n] for n, count in _counted(places.values()).items()) and all(
        asked[n] <= max(memory.get(n, 0) or asked[n], before[n]) for n in asked
    )


def _ways(
    members: Sequence[Member], nodes: Sequence[NodeId]
) -> Iterator[dict[JobId, tuple[NodeId, ...]]]:
    """Yield what could be: for each number of groups, with jobs that have fewer nodes than their
    group on those that they have, or on those with least to do."""
    for found in groupings([member.times for member in members], len(nodes)):
        grouped = [[members[index] for index in group] for group in found.groups]
        for spread in (False, True):
            yield _placed(grouped, found.machines, nodes, spread)


def _pays(members: Sequence[Member], change: Regrouping, nodes: int) -> bool:
    """Say whether all nodes save more seconds until the next job completes than those lose that
    belong to jobs which move."""
    until_s = min(member.left_s for member in members)
    moved = [member for member in members if member.job in change.places]
    lost_s = sum(member.cost_s * len(change.places[member.job]) for member in moved) / nodes
    return until_s * (1.0 - change.before / change.after) > lost_s


def _placed(
    groups: Sequence[Sequence[Member]],
    counts: Sequence[int],
    nodes: Sequence[NodeId],
    spread: bool,
) -> dict[JobId, tuple[NodeId, ...]]:
    """Lay groups over nodes, the largest first, each such that fewest of its jobs move."""
    left = list(nodes)
    places: dict[JobId, tuple[NodeId, ...]] = {}
    for number in sorted(range(len(groups)), key=lambda n: (-len(groups[n]), n)):
        group = groups[number]
        ways = [_around(anchor, group, left, counts[number]) for anchor in group]
        found = min(
            (_on(group, chosen, spread) for chosen in ways),
            key=lambda way: sum(set(way[each.job]) != set(each.nodes) for each in group),
        )
        places |= found
        taken = {node for there in found.values() for node in there}
        left = [node for node in left if node not in taken]
    return places


def _on(
    group: Sequence[Member], chosen: Sequence[NodeId], spread: bool
) -> dict[JobId, tuple[NodeId, ...]]:
    """Place a group's jobs on its nodes, those first that cannot move, then the longest."""
    busy_s = dict.fromkeys(chosen, 0.0)
    found = {}
    for each in sorted(group, key=lambda each: (each.moves, -each.times.iteration_s(1), each.job)):
        near = sorted(chosen, key=lambda node: busy_s[node]) if spread else chosen
        nodes = found[each.job] = _within(each, near, own_first=not spread)
        for node in nodes:
            took_s = each.times.cpu_on_s(len(set(nodes))) + each.times.network_s
            busy_s[node] = busy_s.get(node, 0.0) + took_s
    return found


def _around(
    anchor: Member, group: Sequence[Member], nodes: Sequence[NodeId], count: int
) -> list[NodeId]:
    """Choose nodes for a group: where those are that cannot move, then where the anchor is, then
    where most are."""
    fixed = _counted(each.nodes for each in group if not each.moves)
    there = _counted(each.nodes for each in group)
    return sorted(
        nodes, key=lambda node: (-fixed[node], node not in anchor.nodes, -there[node], node)
    )[:count]


def _within(member: Member, chosen: Sequence[NodeId], own_first: bool) -> tuple[NodeId, ...]:
    """Return the nodes of the group that the job has. One that must have more than the group keeps
    some that it has."""
    if not member.moves:
        return member.nodes
    number = min(max(len(chosen), member.least), member.most)
    own = [node for node in member.nodes if node in chosen] if own_first else []
    found = tuple(dict.fromkeys((*own, *chosen, *member.nodes)))[:number]
    kept = [node for node in member.nodes if node in found]
    ordered = tuple(dict.fromkeys((*kept, *found)))  # Its rank 0 stays where it can.
    return ordered if len(ordered) >= member.least else member.nodes


def _counted(places: Iterable[Sequence[NodeId]]) -> Counter[NodeId]:
    return Counter(node for nodes in places for node in nodes)
