"""The board against a slow reference: whatever a page has seen, it is told what changed since."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackwater.web import board as board_of
from slackwater.web.board import Board

KINDS = ("jobs", "nodes")
Change = tuple[str, str, int | None]
CHANGES = st.lists(
    st.tuples(st.sampled_from(KINDS), st.sampled_from("abc"), st.none() | st.integers(0, 2))
)


def apply(seen: dict[str, dict[str, Any]], changes: dict[str, dict[str, Any]]) -> None:
    """Do what the page does."""
    for kind, values in changes.items():
        for id, value in values.items():
            if value is None:
                seen.get(kind, {}).pop(id, None)
            else:
                seen.setdefault(kind, {})[id] = value


@given(CHANGES, st.lists(st.booleans()))
def test_a_page_that_looks_now_and_then_sees_what_there_is(
    changes: list[Change], looks: list[bool]
) -> None:
    board, seen, version = Board(), {kind: {} for kind in KINDS}, 0
    truth: dict[str, dict[str, int]] = {kind: {} for kind in KINDS}
    for at, (kind, id, value) in enumerate(changes):
        before = board.version
        if value is None:
            board.remove(kind, id)
            truth[kind].pop(id, None)
        else:
            board.put(kind, id, value)
            changed = truth[kind].get(id) != value
            truth[kind][id] = value
            assert board.version == before + changed
        if at < len(looks) and looks[at]:
            apply(seen, board.since(version))
            version = board.version
            assert seen == truth
    apply(seen, board.since(version))
    assert seen == truth
    whole: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS}
    apply(whole, board.since(0))
    assert whole == truth
    assert board.since(board.version) == {}


def test_only_the_newest_state_is_told() -> None:
    board = Board()
    for value in range(5):
        board.put("jobs", "a", value)
    assert board.since(2) == {"jobs": {"a": 4}}
    board.remove("jobs", "a")
    assert board.since(2) == {"jobs": {"a": None}}
    board.put("jobs", "a", 9)
    assert board.since(2) == {"jobs": {"a": 9}}


def test_a_page_that_was_away_for_too_long_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board_of, "GONE_MAX", 2)
    board = Board()
    for id in "abcd":
        board.put("jobs", id, 1)
    seen = board.version
    assert board.knows(seen)
    for id in "abc":
        board.remove("jobs", id)
    assert not board.knows(seen), "that a is gone is not remembered"
    assert board.knows(board.version)
    assert not board.knows(board.version + 1), "a version of a server before this one"


def test_entries_of_a_kind_are_replaced_together() -> None:
    board = Board()
    board.replace("nodes", {"a": 1, "b": 2})
    version = board.version
    board.replace("nodes", {"b": 2, "c": 3})
    assert board.since(version) == {"nodes": {"a": None, "c": 3}}
    assert board.kind("nodes") == {"b": 2, "c": 3}
    board.forget("nodes", "b")
    assert board.since(version) == {"nodes": {"a": None, "c": 3}}, "pages forget it by themselves"
    assert json.dumps(board.since(0)) == '{"nodes": {"c": 3}}'
