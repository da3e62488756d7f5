"""Check what clients were told while parts of a cluster failed: is there an order of their calls,
one after another, each within the time between its call and its answer, that explains every answer?

Jobs are independent of one another, so that each has a history of its own (linearizability is
local). An answer that did not come leaves open whether its call was carried out, now or later. The
search is Wing and Gong's, with Lowe's memory of the configurations that were tried.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Final, Literal

Kind = Literal["submit", "cancel", "get"]
State = Literal["absent", "live", "completed", "cancelled", "failed", "gone"]
"""A job as clients see it. `gone`: it ended, and its record is dropped."""
Outcome = Literal[
    "fresh",  # a submission was taken
    "known",  # a submission found the job there already
    "done",  # a cancel was carried out, or the job had ended
    "no-such",  # a cancel found no such job
    "absent", "live", "completed", "cancelled", "failed",  # what a get found
    "open",  # no answer came: it may have been carried out, or will be
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a client, by its clock. `returned_s` is infinite where no answer came."""

    kind: Kind
    job: str
    called_s: float
    returned_s: float
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Model:
    """A kind of job. `by_itself`: the states that follow one without anybody's call."""

    by_itself: Mapping[State, frozenset[State]]

    def reached(self, state: State) -> frozenset[State]:
        """Return the states that it may be in by itself, this one among them."""
        return self.by_itself.get(state, frozenset()) | {state}


BY_HAND: Final = Model({"cancelled": frozenset({"gone"})})
"""A job whose user never starts it: it lives until it is cancelled."""
PROGRAM: Final = Model(
    {
        "live": frozenset({"completed", "gone"}),
        "completed": frozenset({"gone"}),
        "cancelled": frozenset({"gone"}),
    }
)
"""A job whose program ends by itself, and well."""


def after(state: State, call: Call) -> State | None:
    """Return the state after a call in `state`; None: its answer contradicts that state."""
    match call.kind, call.outcome:
        case "submit", "fresh":
            return "live" if state == "absent" else None
        case "submit", "known" | "open":  # Perhaps by a copy of its own that was sent before.
            return "live" if state == "absent" else state
        case "cancel", "done":
            return "cancelled" if state == "live" else state if state != "absent" else None
        case "cancel", "no-such":
            return state if state in ("absent", "gone") else None
        case "cancel", "open":
            return "cancelled" if state == "live" else state
        case "get", "absent":
            return state if state in ("absent", "gone") else None
        case "get", _:
            return state if state == call.outcome else None
    raise AssertionError(f"a {call.kind} has no outcome {call.outcome}")


def explained(calls: Iterable[Call], model: Model) -> bool:
    """Say whether some order of one job's calls explains all of their answers."""
    # A get without an answer says nothing.
    told = [call for call in calls if (call.kind, call.outcome) != ("get", "open")]
    told.sort(key=lambda call: call.called_s)
    answered = sum(1 << n for n, call in enumerate(told) if call.outcome != "open")
    tried: set[tuple[int, State]] = set()
    stack: list[tuple[int, State]] = [(0, "absent")]
    while stack:
        done, state = stack.pop()
        if done & answered == answered:
            return True
        if (done, state) in tried:
            continue
        tried.add((done, state))
        left = [n for n in range(len(told)) if not done >> n & 1]
        first_s = min(told[n].returned_s for n in left)
        for n in left:
            if told[n].called_s > first_s:
                break  # Another one had its answer before this one was called.
            for now in model.reached(state):
                following = after(now, told[n])
                if following is not None:
                    stack.append((done | 1 << n, following))
    return False


def unexplained(calls: Iterable[Call], models: Mapping[str, Model]) -> dict[str, list[Call]]:
    """Return the histories that no order explains, by job. `models`: each job's."""
    by_job: dict[str, list[Call]] = {}
    for call in calls:
        by_job.setdefault(call.job, []).append(call)
    return {job: found for job, found in by_job.items() if not explained(found, models[job])}


def open_call(kind: Kind, job: str, called_s: float) -> Call:
    """Return a call whose answer did not come."""
    return Call(kind, job, called_s, inf, "open")
