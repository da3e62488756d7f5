"""`slackwater memory top`: who is shown, and what is said of those that are silent."""

from slackwater.cli.memory import LATENCY_HEADS, Seen, _latencies, _overview
from slackwater.console import tables
from slackwater.schemas.base import NodeId
from slackwater.schemas.memory import DeviceHeartbeat, LatencyCause, LatencyInfo, SlabdHeartbeat


def beat(id: str, incarnation: int = 1, node: str = "m1") -> SlabdHeartbeat:
    return SlabdHeartbeat(
        service="slabd", id=id, incarnation=incarnation, at_s=0.0, node=NodeId(node), addresses=(),
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


def test_latency_by_cause_fits_80_columns() -> None:
    """Plain: no lines but the figures', the longest of ids and of figures among them."""
    times: list[tuple[LatencyCause, float, float]] = [
        ("hit", 0.9, 99.4),
        ("lender", 12_345.0, 1.5e6),
        ("write", 57.34, 70e6),
    ]
    device = DeviceHeartbeat(
        service="device", id="d" * 40, incarnation=0, at_s=0.0, node=NodeId("m1"),
        resilience="disk", size_bytes=1, spans=1, mapped_spans=0, lenders=0, read_pages=0,
        read_remote_pages=0, written_pages=0, written_remote_pages=0, backup_waiting_pages=0,
        activity=0.0, latency=tuple(
            LatencyInfo(cause=cause, requests=123_456_789, p50_us=p50, p99_us=p99)
            for cause, p50, p99 in times
        ),
    )  # fmt: skip
    lines = tables.lines(LATENCY_HEADS, _latencies([device]), 80)
    assert len(lines) == 1 + len(times)
    assert max(map(len, lines)) <= 80
    assert [" ".join(line.split()[1:]) for line in lines[1:]] == [
        "nothing (read) 123,456,789 0.9 us 99.4 us",
        "lender 123,456,789 12.3 ms 1.5 s",
        "write to count 123,456,789 57.3 us 70 s",
    ]


def test_of_two_lenders_of_one_id_the_newer_is_shown_and_the_other_told() -> None:
    seen = Seen()
    for second in range(3):
        seen.hear(beat("s1", 1, "m1"), 100.0 + second)
        seen.hear(beat("s1", 2, "m2"), 100.5 + second)
    assert seen.lenders["s1"].node == "m2"
    assert seen.namesake("s1", 103.0) == "two of this id: the older, on m1, ends"
    assert seen.namesake("s1", 120.0) == ""
    seen.hear(beat("s1", 1, "m3"), 130.0)  # Its state was lost, and nobody else is there.
    assert seen.lenders["s1"].node == "m3"
    assert seen.namesake("s1", 130.0) == ""


def test_nobody_there_is_said_instead_of_shown_as_headings() -> None:
    said = _overview(Seen(), 100.0, 80)
    assert "No lender is heard; `slackwater up --lenders N` starts some." in said
    assert said[-1] == "No device is served; `slackwater memory export` serves one."
