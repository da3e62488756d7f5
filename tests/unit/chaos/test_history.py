"""The checker of histories against an obvious one, and against the anomalies that it is to find."""

import itertools
import random
from math import inf

import msgspec
import pytest
from tests.chaos.history import BY_HAND, PROGRAM, Call, Model, State, after, explained, unexplained


def call(kind: str, outcome: str, called_s: float, returned_s: float) -> Call:
    fields = {"called_s": called_s, "returned_s": returned_s, "outcome": outcome}
    return msgspec.convert({"kind": kind, "job": "j", **fields}, Call)


def history(*told: str) -> list[Call]:
    """Each as "kind outcome called-returned"; returned `?`: no answer came."""
    found = []
    for text in told:
        kind, outcome, times = text.split()
        called, _, returned = times.partition("-")
        returned_s = inf if returned == "?" else float(returned)
        found.append(call(kind, outcome, float(called), returned_s))
    return found


@pytest.mark.parametrize(
    "told",
    [
        ["submit fresh 0-1", "get live 2-3", "cancel done 4-5", "get cancelled 6-7"],
        ["submit fresh 0-9", "get absent 1-2", "get live 3-4"],
        ["submit open 0-?", "get absent 1-2", "get live 3-4"],
        ["submit open 0-?", "get absent 100-101"],
        ["submit open 0-?", "submit known 5-6", "get live 7-8"],
        ["submit open 0-?", "submit fresh 5-6"],
        ["submit fresh 0-1", "cancel open 2-?", "get live 3-4", "get cancelled 5-6"],
        ["submit fresh 0-1", "cancel done 2-3", "get absent 4-5", "submit known 6-7"],
        ["submit fresh 0-4", "submit known 0-4"],
        ["get absent 0-1", "submit known 2-3", "get live 4-5"],  # A copy of it was first.
        ["cancel no-such 0-1", "submit fresh 0-1"],
    ],
)
def test_what_can_happen_is_explained(told: list[str]) -> None:
    assert explained(history(*told), BY_HAND)
    assert explained(history(*told), PROGRAM)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("an acknowledged job is lost", ["submit fresh 0-1", "get absent 2-3"]),
        ("a stale read", ["submit fresh 0-1", "get live 2-3", "get absent 4-5"]),
        ("taken twice", ["submit fresh 0-1", "submit fresh 2-3"]),
        ("taken twice at once", ["submit fresh 0-4", "submit fresh 0-4"]),
        ("a cancel is lost", ["submit fresh 0-1", "cancel done 2-3", "get live 4-5"]),
        ("cancelled before", ["submit fresh 0-1", "cancel no-such 2-3"]),
        ("it lives again", ["submit fresh 0-1", "cancel done 2-3", "submit fresh 4-5"]),
        ("an open call that came and went", [
            "submit open 0-?", "get live 1-2", "get absent 3-4",
        ]),
        ("it ended by itself", ["submit fresh 0-1", "get completed 2-3"]),
        ("it failed", ["submit fresh 0-1", "get failed 2-3"]),
    ],
)  # fmt: skip
def test_what_cannot_happen_is_found(name: str, told: list[str]) -> None:
    assert not explained(history(*told), BY_HAND), name


def test_a_program_s_job_ends_by_itself_but_not_with_a_failure_nor_twice() -> None:
    assert explained(history("submit fresh 0-1", "get completed 2-3", "get absent 4-5"), PROGRAM)
    assert not explained(history("submit fresh 0-1", "get failed 2-3"), PROGRAM)
    assert not explained(history("submit fresh 0-1", "get absent 2-3", "get live 4-5"), PROGRAM)
    assert not explained(
        history("submit fresh 0-1", "get completed 2-3", "submit fresh 4-5"), PROGRAM
    )


def test_each_job_has_a_history_of_its_own() -> None:
    calls = [
        Call("submit", "a", 0.0, 1.0, "fresh"),
        Call("get", "a", 2.0, 3.0, "live"),
        Call("submit", "b", 0.0, 1.0, "fresh"),
        Call("get", "b", 2.0, 3.0, "absent"),
    ]
    assert list(unexplained(calls, {"a": BY_HAND, "b": BY_HAND})) == ["b"]


def obvious(calls: list[Call], model: Model) -> bool:
    """Try all orders of all calls that were answered with any of the others."""
    answered = [call for call in calls if call.outcome != "open"]
    others = [call for call in calls if call.outcome == "open" and call.kind != "get"]
    for number in range(len(others) + 1):
        for some in itertools.combinations(others, number):
            for order in itertools.permutations([*answered, *some]):
                pairs = itertools.combinations(order, 2)
                if all(b.returned_s >= a.called_s for a, b in pairs) and _follows(order, model):
                    return True
    return False


def _follows(order: tuple[Call, ...], model: Model) -> bool:
    states: set[State] = {"absent"}
    for call in order:
        reached = {now for state in states for now in model.reached(state)}
        states = {s for s in (after(now, call) for now in reached) if s is not None}
    return bool(states)


OUTCOMES = {
    "submit": ["fresh", "known", "open"],
    "cancel": ["done", "no-such", "open"],
    "get": ["absent", "live", "completed", "cancelled"],
}


@pytest.mark.parametrize("model", [BY_HAND, PROGRAM])
def test_random_histories_are_judged_as_by_the_obvious_checker(model: Model) -> None:
    rng, good = random.Random(7), 0
    for _ in range(1500):
        calls = []
        for _ in range(rng.randint(1, 5)):
            kind = rng.choice([*OUTCOMES])
            outcome = rng.choice(OUTCOMES[kind])
            called_s = rng.uniform(0.0, 6.0)
            returned_s = inf if outcome == "open" else called_s + rng.uniform(0.1, 4.0)
            calls.append(call(kind, outcome, called_s, returned_s))
        verdict = explained(calls, model)
        assert verdict == obvious(calls, model), calls
        good += verdict
    assert 100 < good < 1400  # Both verdicts occur often.
