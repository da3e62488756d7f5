"""Permits of a node: whose subtask computes, and whose moves bytes, at a time (Lee 2020, 4.3.1).

Processes of jobs that take turns ask for a permit before they compute, and for another one before
bytes of theirs move; they give it back at the end of that subtask, and hold none while they wait
for anybody else. So of jobs that share the node one computes while another one communicates, and no
two processes can wait for one another. First come, first served.

One process sends, and one receives, as the primary one: a link carries as much each way. Where the
node knows its link, another one may do so as the secondary: with what the primary leaves of the
link. It becomes the primary when that one ends.

Who holds a permit for much longer than its job's subtasks take, while others wait, loses its claim:
it goes on, and so do the others, without an order among them. A program that never gives a permit
back, or that waits for others in the midst of computing, so holds nobody up for long.

Pure: time comes with each call.
"""

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from slackwater.schemas.relay import PermitKind

LATE_TIMES: Final = 8.0
"""A holder is late after so many times the seconds that its job's subtasks take."""
LATE_S_MIN: Final = 0.25
"""But not before: a busy machine stops any process for a while."""
LATE_S_MAX: Final = 10.0
"""Nor after: so long waits whoever comes behind a job that is not known yet, or never ends."""
WEIGHT: Final = 0.2
"""Weight of the newest subtask in the moving average of their seconds."""
TRANSITIONS: Final[dict[tuple[str, str], str]] = {
    ("idle", "ask"): "waits",
    ("waits", "grant"): "primary",
    ("waits", "grant beside"): "secondary",
    ("waits", "end"): "idle",
    ("primary", "end"): "idle",
    ("primary", "late"): "late",
    ("secondary", "end"): "idle",
    ("secondary", "raise"): "primary",
    ("late", "end"): "idle",
}
"""State and event -> the state that follows. Anything else is a defect, or was not asked for."""


class Grant(NamedTuple):
    """A lane may begin, or go on as the primary one."""

    lane: int
    secondary: bool


class Late(NamedTuple):
    """A holder that others wait for no more."""

    job: str
    kind: PermitKind
    held_s: float


@dataclass(slots=True)
class Usage:
    """The use of one kind of permit by the subtasks of one job."""

    subtasks: int = 0
    held_s: float = 0.0
    waited_s: float = 0.0
    late: int = 0
    mean_s: float = 0.0
    """The moving average of a subtask; 0: none has ended."""

    def ended(self, held_s: float) -> None:
        self.mean_s = held_s if not self.subtasks else (1 - WEIGHT) * self.mean_s + WEIGHT * held_s
        self.subtasks += 1
        self.held_s += held_s

    @property
    def late_s(self) -> float:
        """Return the seconds after which a holder is late."""
        if not self.subtasks:
            return LATE_S_MAX
        return min(LATE_S_MAX, max(LATE_S_MIN, LATE_TIMES * self.mean_s))


@dataclass(slots=True)
class _Lane:
    """One connection of a process, which has one subtask at a time."""

    job: str
    kind: PermitKind = "compute"
    state: str = "idle"
    since_s: float = 0.0

    def goes(self, event: str) -> None:
        self.state = TRANSITIONS[self.state, event]


@dataclass(slots=True)
class _Queue:
    """One kind of permit."""

    primaries_max: int
    secondaries_max: int
    waiting: deque[int] = field(default_factory=deque)
    holding: dict[int, None] = field(default_factory=dict)
    """Lanes with a permit that counts, in the order of their grants."""


class Permits:
    """`computing`, `moving`: processes that may compute, and move bytes each way, at once;
    `secondary`: another one may move bytes beside these."""

    def __init__(self, computing: int = 1, moving: int = 1, *, secondary: bool = False) -> None:
        self._queues: dict[PermitKind, _Queue] = {
            "compute": _Queue(computing, 0),
            "move": _Queue(moving, int(secondary)),
            "receive": _Queue(moving, int(secondary)),
        }
        self._lanes: dict[int, _Lane] = {}
        self.usage: dict[tuple[str, PermitKind], Usage] = {}
        """By job; those of jobs without a lane are forgotten."""

    def opened(self, lane: int, job: str) -> None:
        """A process of the job has connected."""
        self._lanes[lane] = _Lane(job)

    def closed(self, lane: int, now_s: float) -> list[Grant]:
        """Its connection is lost: what it held is free, what it asked for is not waited for."""
        granted = self.ended(lane, now_s)
        known = self._lanes.pop(lane, None)
        if known is not None and all(each.job != known.job for each in self._lanes.values()):
            for kind in self._queues:
                self.usage.pop((known.job, kind), None)
        return granted

    def asked(self, lane: int, kind: PermitKind, now_s: float) -> list[Grant] | None:
        """The lane's process wants to begin a subtask. None: it has one already."""
        known = self._lanes[lane]
        if known.state != "idle":
            return None
        known.goes("ask")
        known.kind, known.since_s = kind, now_s
        self._queues[kind].waiting.append(lane)
        return self._grants(kind, now_s)

    def ended(self, lane: int, now_s: float) -> list[Grant]:
        """The lane's subtask is over. Repeated, it changes nothing."""
        known = self._lanes.get(lane)
        if known is None or known.state == "idle":
            return []
        queue = self._queues[known.kind]
        if known.state == "waits":
            queue.waiting.remove(lane)
        else:
            queue.holding.pop(lane, None)
            self._of(known).ended(now_s - known.since_s)
        known.goes("end")
        return self._grants(known.kind, now_s)

    def look(self, now_s: float) -> tuple[list[Grant], list[Late]]:
        """Let others go on where a holder is late and somebody waits for it."""
        granted, late = list[Grant](), list[Late]()
        for kind, queue in self._queues.items():
            for lane in tuple(queue.holding) if queue.waiting else ():
                known = self._lanes[lane]
                held_s = now_s - known.since_s
                if known.state != "primary" or held_s < self._of(known).late_s:
                    continue
                known.goes("late")
                del queue.holding[lane]
                self._of(known).late += 1
                late.append(Late(known.job, kind, held_s))
            granted += self._grants(kind, now_s)
        return granted, late

    @property
    def due_s(self) -> float | None:
        """Return when `look` is to be called; None: nobody waits for a holder."""
        dues = [
            self._lanes[lane].since_s + self._of(self._lanes[lane]).late_s
            for queue in self._queues.values()
            if queue.waiting
            for lane in queue.holding
            if self._lanes[lane].state == "primary"
        ]
        return min(dues, default=None)

    @property
    def kinds(self) -> tuple[PermitKind, ...]:
        return tuple(self._queues)

    def counts(self, kind: PermitKind) -> Counter[str]:
        """Count the lanes of this kind in each state."""
        return Counter(each.state for each in self._lanes.values() if each.kind == kind)

    def _of(self, lane: _Lane) -> Usage:
        return self.usage.setdefault((lane.job, lane.kind), Usage())

    def _grants(self, kind: PermitKind, now_s: float) -> list[Grant]:
        """Give away what is free: the oldest secondary becomes a primary one before anybody else
        does."""
        queue, granted = self._queues[kind], list[Grant]()
        states = {lane: self._lanes[lane].state for lane in queue.holding}
        primaries = sum(state == "primary" for state in states.values())
        beside = [lane for lane, state in states.items() if state == "secondary"]
        while beside and primaries < queue.primaries_max:
            lane = beside.pop(0)
            self._lanes[lane].goes("raise")
            granted.append(Grant(lane, secondary=False))
            primaries += 1
        while queue.waiting and (
            primaries < queue.primaries_max or len(beside) < queue.secondaries_max
        ):
            lane = queue.waiting.popleft()
            known, secondary = self._lanes[lane], primaries >= queue.primaries_max
            known.goes("grant beside" if secondary else "grant")
            self._of(known).waited_s += now_s - known.since_s
            known.since_s = now_s
            queue.holding[lane] = None
            granted.append(Grant(lane, secondary))
            primaries += not secondary
            beside += [lane] * secondary
        return granted
