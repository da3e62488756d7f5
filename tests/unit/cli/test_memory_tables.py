"""`slackwater memory top`: who is shown, and what is said of those that are silent."""

from slackwater.cli.memory import Seen
from slackwater.schemas.base import NodeId
from slackwater.schemas.memory import SlabdHeartbeat


def beat(id: str) -> SlabdHeartbeat:
    return SlabdHeartbeat(
        service="slabd", id=id, incarnation=1, at_s=0.0, node=NodeId("m1"), addresses=(),
        slab_bytes=4096, free_slabs=1, lent_slabs=0, devices=0, total_bytes=1, used_bytes=0,
        headroom_bytes=0,
    )  # fmt: skip


def test_a_silent_lender_is_told_and_forgotten_after_a_while() -> None:
    seen = Seen()
    for id in ("s1", "s2"):
        seen.hear(beat(id), 100.0)
    seen.hear(beat("s2"), 130.0)
    assert seen.silence(seen.lenders["s2"], 132.0) == ""
    assert seen.silence(seen.lenders["s1"], 132.0) == "not heard for 32 s"
    seen.forget(150.0)
    assert list(seen.lenders) == ["s1", "s2"]
    seen.forget(165.0)
    assert list(seen.lenders) == ["s2"]
