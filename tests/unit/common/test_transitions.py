"""A state machine moves by its table; what broke it is told with its story."""

import pytest

from slackwater.common.base.transitions import STORY_MAX, InvalidTransition, Story
from slackwater.memory.control.spans import TRANSITIONS as MEMBER
from slackwater.memory.control.spans import Member
from slackwater.schemas.memory import LenderId, SlabId
from slackwater.services.slabd.slab import TRANSITIONS as SLAB
from slackwater.services.slabd.slab import Slab


def test_an_impossible_transition_tells_the_story() -> None:
    slab = Slab(SlabId("a" * 12), "making")
    slab.become_free()
    slab.move("lent", "MAP of d1")
    with pytest.raises(InvalidTransition) as caught:
        slab.move("free", "its memory is new")
    text = str(caught.value)
    assert f"slab {slab.id}: lent -> free (its memory is new) is impossible" in text
    assert "making (it is made or found), free (its memory is new), lent (MAP of d1)" in text
    assert slab.state == "lent", "it stays what it was"


def test_a_member_that_searches_has_no_lender() -> None:
    member = Member(span=3, index=0, number=7, state="placing")
    member.map_at(LenderId("s1"))
    member.search("s1 has become fuller")
    assert (member.state, member.lender) == ("placing", None)
    with pytest.raises(InvalidTransition, match="member 7 of span 3: placing -> open"):
        member.move("open", "its slab is here")


def test_a_story_is_bounded() -> None:
    story, table = Story(), {"a": frozenset({"a"})}
    story.begin("a", "0")
    for number in range(10 * STORY_MAX):
        story.move("x", "a", "a", str(number), table)
    assert str(story).count("(") == STORY_MAX


@pytest.mark.parametrize("table", [MEMBER, SLAB])
def test_every_state_can_be_reached_and_left(table: dict[str, frozenset[str]]) -> None:
    first = next(iter(table))
    seen, waiting = {first}, [first]
    while waiting:
        waiting += new if (new := [s for s in table[waiting.pop()] if s not in seen]) else []
        seen.update(waiting)
    begun = {"held", "evicting", "renewing"} if table is SLAB else set()
    assert seen | begun == table.keys()
    assert [state for state, after in table.items() if not after] == ["leaving"]
