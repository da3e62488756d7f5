"""The cache of tables in a host: what a task reads, and what it may add."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackwater.agent.table_rows import RowNumbers, RowUpdates
from slackwater.common.base.errors import Rejected
from slackwater.common.domains.slots.rules import Floats
from slackwater.elastic.app import EXACT_MAX, Table
from slackwater.elastic.cache import TableCache
from slackwater.elastic.rules import ADD, AdaGrad, NonNegative, SoftThreshold, TableRule


class Store:
    """The tables elsewhere."""

    def __init__(self, *, sparse: bool, rule: TableRule = ADD) -> None:
        self.rule = rule
        tables = {
            "w": Table(4, 2, sparse=sparse, rule=rule),
            "n": Table(3, 1, dtype="int32", sparse=sparse),
        }
        self.values = {name: table.first_values(name) for name, table in tables.items()}
        self.read: list[list[int]] = []
        """Rows that were read of sparse tables."""
        self.cache = TableCache(tables, lambda name: self.values[name].copy(), self.rows)

    def rows(self, name: str, rows: RowNumbers) -> Floats:
        self.read.append(rows.tolist())
        return self.values[name][rows]

    def flush(self) -> None:
        for name, delta in self.cache.log.items():
            values, count = self.values[name], self.cache.counts.get(name, 1)
            rule = self.rule if name == "w" and self.rule.shows else ADD
            if isinstance(delta, RowUpdates):
                values[delta.rows] = rule.after(values[delta.rows], delta.values, count)
            else:
                self.values[name] = rule.after(values, delta, count)
        self.cache.sent()


@pytest.fixture(params=[False, True], ids=["whole", "rows"])
def sparse(request: pytest.FixtureRequest) -> bool:
    found: bool = request.param
    return found


def test_a_value_is_fetched_once_a_version_and_serves_older_orders(sparse: bool) -> None:
    store = Store(sparse=sparse)
    for version in (3, 3, 2, 0, 4):
        store.cache.get("w", None, version)
    assert (store.cache.gets, store.cache.fetches) == (5, 2)


def test_rows_are_fetched_that_are_asked_for_and_not_there_yet() -> None:
    store = Store(sparse=True)
    for rows, version in (([2, 0, 2], 1), ([0], 1), ([0, 1], 0), ([0, 1, 3], 2)):
        store.cache.get("w", rows, version)
    assert store.read == [[0, 2], [1], [0, 1, 3]]
    assert store.cache.fetches == 3


def test_what_is_returned_is_a_copy(sparse: bool) -> None:
    cache = Store(sparse=sparse).cache
    cache.get("w", None, 0)[:] = 7
    cache.get("w", [1], 0)[:] = 7
    assert not cache.get("w", None, 0).any()


def test_updates_of_a_task_count_once_it_is_complete(sparse: bool) -> None:
    store = Store(sparse=sparse)
    store.cache.update("w", np.ones((4, 2)), None)
    assert store.cache.get("w", [0], 0).tolist() == [[1, 1]], "it reads its own"
    assert not store.cache.log
    store.cache.discard()
    assert not store.cache.get("w", None, 0).any()
    store.cache.update("w", [[1, 2], [3, 4]], [2, 2])
    store.cache.complete()
    log = store.cache.log["w"]
    if isinstance(log, RowUpdates):
        assert (log.rows.tolist(), log.values.tolist()) == ([2], [[4, 6]])
    else:
        assert log[2].tolist() == [4, 6], "a row that is named twice"


@given(
    st.lists(st.sampled_from(["add", "complete", "discard", "flush", "other", "read", "clear"])),
    st.sampled_from([(False, ADD, 1), (True, NonNegative(), 1), (False, SoftThreshold(2.0), 3)]),
)
def test_reads_are_what_was_read_plus_all_of_our_own(
    steps: list[str], kind: tuple[bool, TableRule, int]
) -> None:
    """However adds, flushes and others' updates follow one another; and each update has its own
    threshold."""
    by_rows, rule, added = kind
    store = Store(sparse=by_rows, rule=rule)
    own, task, version = 0.0, 0.0, 0
    seen = 0.0
    for step in steps:
        if step == "add":
            store.cache.update("w", np.full((4, 2), added), None)
            task += 1
        elif step == "complete":
            store.cache.complete()
            own, task = own + task, 0.0
        elif step == "discard":
            store.cache.discard()
            task = 0.0
        elif step == "flush":
            store.flush()
        elif step == "clear":
            store.flush()
            store.cache.clear()
        elif step == "other":
            store.values["w"] += 100
            version += 1
        else:
            value = float(store.cache.get("w", None, version)[0, 0])
            assert value % 100 == own + task
            assert value // 100 == version
            assert value - task >= seen, "what was complete stays"
            seen = value - task


def test_what_adagrad_makes_of_an_update_is_read_once_it_was_sent(sparse: bool) -> None:
    store = Store(sparse=sparse, rule=AdaGrad(1.0))
    store.cache.update("w", [[1, 2]], [3])
    store.cache.complete()
    assert not store.cache.get("w", [3], 0).any(), "the host has not the sums of squares"
    store.flush()
    assert store.cache.get("w", [3], 0).tolist() == [[1, 2]], "whatever the store made of it"


def test_a_table_that_shrinks_takes_no_update_of_some_rows() -> None:
    cache = Store(sparse=False, rule=SoftThreshold(1.0)).cache
    with pytest.raises(
        Rejected, match=r"table w: SoftThreshold\(by=1.0\) takes updates of all rows"
    ):
        cache.update("w", [[1, 2]], [3])


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda c: c.get("x", None, 0), "unknown table 'x'; the program has w, n"),
        (lambda c: c.get("w", [4], 0), "row 4; it has 4, from 0 on"),
        (lambda c: c.get("w", [-1], 0), "row -1"),
        (lambda c: c.get("w", [0.5], 0), "rows are float64"),
        (lambda c: c.get("w", 1, 0), "of 0 dimensions"),
        (lambda c: c.update("w", np.ones(2), None), r"shape \(2,\), what it goes to has \(4, 2\)"),
        (lambda c: c.update("w", np.ones((4, 2)), [1]), r"has \(1, 2\)"),
        (lambda c: c.update("w", np.full((4, 2), np.nan), None), "NaN or infinity"),
        (lambda c: c.update("w", np.full((4, 2), 1e300), None), "NaN or infinity"),
        (lambda c: c.update("w", [["a"] * 2] * 4, None), "give real numbers"),
        (lambda c: c.update("n", [[0.5]] * 3, None), "its numbers are whole"),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow")
def test_a_wrong_call_is_refused_and_changes_nothing(call: Any, why: str, sparse: bool) -> None:
    cache = Store(sparse=sparse).cache
    with pytest.raises(Rejected, match=why):
        call(cache)
    cache.complete()
    assert not cache.log


def test_counts_are_whole_and_refused_where_they_would_not_be_exact(sparse: bool) -> None:
    store = Store(sparse=sparse)
    store.cache.update("n", [[EXACT_MAX - 1]], [0])
    found = store.cache.get("n", None, 0)
    assert (found.dtype, found.tolist()) == (np.int32, [[EXACT_MAX - 1], [0], [0]])
    store.cache.update("n", [[1]], [0])
    with pytest.raises(Rejected, match="2\\^24"):
        store.cache.get("n", None, 0)


def test_what_a_waiting_task_added_is_its_own(sparse: bool) -> None:
    store = Store(sparse=sparse)
    cache = store.cache
    cache.update("w", np.ones((4, 2)), None)
    cache.put_aside()
    assert not cache.get("w", None, 0).any(), "it is not complete"
    cache.update("w", [[5, 5]], [2])
    cache.complete()
    cache.take_back()
    assert cache.get("w", None, 0)[:, 0].tolist() == [1, 1, 6, 1]
    cache.put_aside()
    cache.update("n", [[1], [1], [1]], None)
    cache.discard()
    cache.take_back()
    cache.discard()
    assert cache.get("w", None, 0)[:, 0].tolist() == [0, 0, 5, 0]
    assert cache.get("n", None, 0)[:, 0].tolist() == [0, 0, 0]
    assert [*cache.log] == ["w"]


def test_an_older_read_that_comes_later_lowers_no_tag(sparse: bool) -> None:
    """A read of version 1 waits; meanwhile a newer order's task reads the same."""
    store = Store(sparse=sparse)
    old = store.values["w"].copy()
    nested = [2]

    def read(name: str, rows: RowNumbers | None = None) -> Floats:
        if nested:
            store.values["w"] += 1.0
            store.cache.put_aside()
            assert store.cache.get("w", [1, 3], nested.pop()).tolist() == [[1, 1], [1, 1]]
            store.cache.take_back()
            return old if rows is None else old[rows]
        return store.values[name].copy() if rows is None else store.values[name][rows]

    tables = {"w": Table(4, 2, sparse=sparse)}
    store.cache = TableCache(tables, read, read)
    store.cache.get("w", None, 1)
    fetches = store.cache.fetches
    assert store.cache.get("w", [1, 3], 2).tolist() == [[1, 1], [1, 1]]
    assert store.cache.fetches == fetches
