"""Order of leaving local memory: what a scan has passed, then the oldest."""

from hypothesis import given
from hypothesis import strategies as st

from slackwater.memory.array.residency import Residency


def test_what_a_scan_has_passed_goes_before_what_is_older() -> None:
    local = Residency(100, 4)
    for page in (9, 5, 7, 3):
        local.add(page, dirty=False)
    local.consume([7, 50])  # 50 is not here.
    assert local.excess(0) == 0
    assert local.excess(2) == 2
    assert local.victims(3) == [7, 9, 5]
    local.soil(7)  # It is in use after all.
    assert local.victims(2) == [9, 5]
    assert local.dirty_pages() == [7]
    local.clean(7)
    assert local.dirty_pages() == []


@given(st.lists(st.tuples(st.sampled_from("acsr"), st.integers(0, 9)), max_size=60))
def test_it_agrees_with_lists(calls: list[tuple[str, int]]) -> None:
    local = Residency(10, 5)
    order: list[int] = []
    passed: list[int] = []
    dirty: set[int] = set()
    for call, page in calls:
        if call == "a" and page not in order:
            local.add(page, dirty=page % 2 == 0)
            order.append(page)
            dirty |= {page} if page % 2 == 0 else set()
        elif call == "c":
            local.consume([page])
            if page in order and page not in passed:
                passed.append(page)
        elif page not in order:
            continue
        elif call == "s":
            local.soil(page)
            dirty.add(page)
            passed = [one for one in passed if one != page]
        elif call == "r":
            local.remove(page)
            order.remove(page)
            dirty.discard(page)
            passed = [one for one in passed if one != page]
        assert [page in local for page in range(10)] == [page in order for page in range(10)]
        assert local.dirty_pages() == sorted(dirty)
        expected = passed + [one for one in order if one not in passed]
        for count in range(11):
            assert local.victims(count) == expected[:count]
        assert local.excess(3) == max(0, len(order) + 3 - 5)
