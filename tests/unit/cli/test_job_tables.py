"""Tables of jobs and aggregators: at 80 columns, on a pipe, with a hundred of them."""

import json
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from tests.unit.cli import jobs as made
from tests.unit.cli.jobs import NOW_S, aggregator, failed, listed, pending, running

from slackwater.cli.job import described
from slackwater.cli.jobs import arranged, ending, table
from slackwater.cli.pool import aggregator_table, tenant_table
from slackwater.cli.top import Seen, screen
from slackwater.console import documents, figures, tables
from slackwater.console.outcome import print_json
from slackwater.console.tables import Row, natural
from slackwater.schemas.base import JobId, NodeId
from slackwater.schemas.cluster import PermitUse, TurnGroup
from slackwater.schemas.job_requests import JobInfo
from slackwater.schemas.jobs import JobRecord, JobSpec
from slackwater.schemas.progress import RankProgress
from slackwater.schemas.steps import StepProfile
from slackwater.schemas.tenants import TenantInfo


def test_a_job_shows_how_far_how_fast_and_where_it_is() -> None:
    heads, row = table(listed(running("k1")), wide=False, width=None)
    assert heads.split() == [
        "JOB", "STATE", "AGE", "PROGRESS", "SPEED", "LOSS", "ETA", "GPUS",
        "AGGREGATORS", "WHY",
    ]  # fmt: skip
    assert re.split(r"  +", row) == [
        "k1", "running", "11m", "7,210/20,000", "6.1 it/s", "3.0%", "34m", "-", "a2,a10", "-",
    ]  # fmt: skip


def test_a_program_that_counts_for_itself_is_shown_without_a_total() -> None:
    job = running("k1")
    assert job.progress is not None
    own = msgspec.structs.replace(job.progress, iteration=40, iterations=0, eta_s=None)
    row = table(listed(msgspec.structs.replace(job, progress=own)), wide=False, width=None)[1]
    assert re.split(r"  +", row)[3] == "40"


def test_piped_nothing_is_cut_and_every_row_is_one_line() -> None:
    """`jobs | grep ID` finds it, `awk` finds the columns."""
    long = "x" * 63
    rows = table(listed(running(long), failed("k2", "one\ntwo\x1b[31m")), wide=False, width=None)
    assert rows[1].startswith(long + "  running")
    assert rows[2].endswith("one two [31m")
    assert len(rows) == 3
    at = rows[0].index("STATE")
    assert [row[at:].split()[0] for row in rows[1:]] == ["running", "failed"]


def test_at_80_columns_a_reason_squeezes_no_column() -> None:
    jobs = listed(running("vgg19-1"), pending("k2"), failed("k1"), running("y" * 63))
    rows = table(jobs, wide=False, width=80)
    assert all(cell_len(row) <= 80 for row in rows)
    assert "7,210/20,000  6.1 it/s  3.0%  34m  a2,a10" in rows[1]
    assert "waits for 4 worker slots: 1 of 8" in rows[2]
    assert "175/300" in rows[3]
    assert "rank 1 on w1 ended" in rows[3]
    assert rows[3].endswith("…")
    assert "completed" not in rows[0]


@given(
    st.lists(
        st.tuples(st.lists(st.text(max_size=30), min_size=3, max_size=3), st.text(max_size=90)),
        max_size=9,
    ),
    st.integers(20, 200),
)
def test_no_row_is_wider_than_the_terminal(rows: list[tuple[list[str], str]], width: int) -> None:
    given = [Row(tuple(cells), note) for cells, note in rows]
    found = tables.lines(("A", "B", "C"), given, width, note="WHY")
    assert len(found) == len(rows) + 1
    assert all(cell_len(line) <= width and "\n" not in line for line in found)
    piped = tables.lines(("A", "B", "C"), given, None, note="WHY")
    assert not any(set(line) & set("\n\r\x1b") for line in piped)
    words = [word for cells, note in rows for word in " ".join([*cells, note]).split()]
    assert all(word in "\n".join(piped) for word in words if word.isprintable())


def test_ids_are_sorted_as_people_count() -> None:
    jobs = listed(*(running(f"a{n}") for n in (10, 2, 1)))
    assert [job.id for job in arranged(jobs, "id").jobs] == ["a1", "a2", "a10"]
    assert sorted(["b", "a10", "a2", "a", "10", "9"], key=natural) == [
        "9", "10", "a", "a2", "a10", "b",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("order", "first"), [("speed", "fast"), ("loss", "slow"), ("eta", "fast"), ("progress", "slow")]
)
def test_jobs_are_sorted_by_what_is_asked(order: str, first: str) -> None:
    jobs = listed(pending("p"), running("slow", 9_000, 0.1, 0.2), running("fast", 100, 99.0, 0.01))
    assert arranged(jobs, order).jobs[0].id == first  # type: ignore[arg-type]
    shown = arranged(jobs, order, limit=1)  # type: ignore[arg-type]
    assert (len(shown.jobs), shown.hidden) == (1, 2)


def test_an_empty_list_says_so_and_hidden_jobs_are_counted() -> None:
    assert table(listed(), wide=False, width=80) == []
    assert ending(listed(), "failed", None) == (
        "There are no failed jobs; `slackwater submit` starts one."
    )
    assert ending(listed(running("k"), hidden=990), None, "t") == (
        "990 more jobs of tenant t are not shown; --all shows those that ended."
    )
    assert ending(listed(running("k")), None, None) == ""


def test_json_leaves_nothing_out(capsys: pytest.CaptureFixture[str]) -> None:
    """Defaults are there, results are values, times have a text beside the number."""
    record = JobRecord(
        spec=JobSpec(id="k", program=("python", "train.py", "--x")), state="completed",
        submitted_s=NOW_S, results={"0": '{"loss": 0.5}', "1": "", "2": "no json"},
    )  # fmt: skip
    print_json([documents.job(record, None)])
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["spec"]["servers"], found["spec"]["workers"]) == (1, 1)
    assert found["spec"]["program"] == ["python", "train.py", "--x"]
    assert found["results"] == {"0": {"loss": 0.5}, "1": None, "2": "no json"}
    assert (found["submitted_s"], found["submitted"]) == (NOW_S, "2027-01-15T08:00:00Z")
    assert (found["finished_s"], found["finished"], found["progress"]) == (0.0, None, None)
    assert msgspec.convert({"spec": found["spec"]}, JobRecord).spec == record.spec


@pytest.mark.parametrize(
    ("iterations_s", "text"),
    [(0.0, "-"), (6e-19, "0 it/min"), (0.001, "0.06 it/min"), (0.09, "5.4 it/min"),
     (6.1, "6.1 it/s"), (1234.0, "1,234 it/s")],
)  # fmt: skip
def test_a_speed_is_readable_however_small(iterations_s: float, text: str) -> None:
    """Regression: a job that hung for seven minutes was shown with 3.6e-17 it/min."""
    assert figures.speed(iterations_s) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0s"), (0, "0s"), (59, "59s"), (60, "1m"), (185, "3m5s"), (2_100, "35m"),
     (9_600, "2h40m"), (36_000, "10h"), (350_000, "4d1h"), (10**7, "115d")],
)  # fmt: skip
def test_a_duration_has_two_units_at_most(seconds: float, text: str) -> None:
    assert figures.lasted(seconds) == text


# One job ------------------------------------------------------------------------------------------


def test_a_job_is_described_with_its_ranks_and_why() -> None:
    job = running("k1")
    assert job.progress is not None
    ranks = (
        RankProgress(rank=0, iteration=7_211, speed=6.1, heard_s=NOW_S - 1),
        RankProgress(rank=1, iteration=7_210, speed=6.1, heard_s=NOW_S - 40),
    )
    record = msgspec.structs.replace(job.record, reason="waits for aggregator a2, silent for 9 s")
    text = described(
        JobInfo(job=record, progress=msgspec.structs.replace(job.progress, ranks=ranks)), NOW_S, 80
    )
    assert "State:        running, for 11m" in text
    assert "Why:          waits for aggregator a2, silent for 9 s" in text
    assert "Aggregators:  a2, a10 (steady)" in text
    assert "Progress:     7,210/20,000, 6.1 it/s, 34m left" in text
    assert text[-1].split() == ["1", "7,210/20,000", "6.1", "it/s", "40s", "ago"]


def test_a_job_that_failed_shows_what_its_ranks_gave() -> None:
    record = msgspec.structs.replace(failed("k", "rank 1 failed").record, results={"0": ""})
    text = described(JobInfo(job=record), NOW_S)
    assert "State:        failed, 3m ago, after 2h10m" in text
    assert text[-1].split("  ")[-1] == "done, without a result"


def test_a_job_that_was_run_again_and_restarted_says_so() -> None:
    record = msgspec.structs.replace(
        failed("k").record,
        run=2, restarts={"1": 2, "0": 1},
        spec=JobSpec(id="k", workers=2, restarts=5, iterations=300),
    )  # fmt: skip
    text = described(JobInfo(job=record), NOW_S)
    assert "Run:          3" in text
    assert "Restarts:     3 of 5 (rank 0: 1, rank 1: 2)" in text
    assert "Asked for:    2 workers, 1 server, 300 iterations" in text


def test_a_job_whose_optimiser_is_in_its_program_says_so() -> None:
    record = msgspec.structs.replace(running("j1").record, sums=True)
    assert "Aggregation:  adds gradients up, the optimiser is in the program" in described(
        JobInfo(job=record), NOW_S
    )


def test_a_job_that_takes_turns_shows_what_it_had_on_each_node() -> None:
    turns = (
        PermitUse(job=JobId("j1"), node=NodeId("w1"), computed_s=12.34, moved_s=5.0, waited_s=0.5),
        PermitUse(job=JobId("j1"), node=NodeId("w2"), computed_s=1.0, late=2),
    )
    text = described(JobInfo(job=running("j1").record, turns=turns), NOW_S)
    first = text.index(
        "Turns:        w1: computed 12.3 s, moved bytes 5.0 s, waited 0.5 s for its turn"
    )
    assert text[first + 1].strip().startswith("w2: computed 1.0 s")
    assert text[first + 1].endswith("kept a permit too long 2 times: others went on")


def test_a_job_that_takes_turns_shows_how_far_its_group_is() -> None:
    def said(**fields: Any) -> list[str]:
        info = JobInfo(job=running("j1").record, group=TurnGroup(**fields))
        return [line for line in described(info, NOW_S) if line.startswith("Turns:")]

    assert said(state="profiling") == ["Turns:        profiling"]
    assert said(
        state="running", computing_s=0.2123, moving_s=0.14, nodes=2, shares_with=("a", "b")
    ) == [
        "Turns:        running: an iteration computes for 0.212 s and moves bytes for 0.14 s on 2 "
        "nodes; it shares nodes with a, b"
    ]


# The pool -----------------------------------------------------------------------------------------


def test_a_drained_aggregator_does_not_look_like_any_other() -> None:
    infos = (
        aggregator("a10"), aggregator("a2", drain="draining"), aggregator("a1", cluster=""),
        aggregator("a3", alive=False),
    )  # fmt: skip
    rows = [line.split()[:2] for line in aggregator_table(infos, 80)[1:]]
    assert rows == [["a1", "free"], ["a2", "draining"], ["a3", "lost"], ["a10", "serving"]]


def test_the_link_of_an_aggregator_is_shown_where_its_budget_is_known() -> None:
    known = aggregator("a1")
    assert known.heartbeat is not None
    beat = msgspec.structs.replace(
        known.heartbeat, network_budget_bytes_s=1_250_000_000, network_load_bytes_s=250_000_000
    )
    infos = (msgspec.structs.replace(known, heartbeat=beat), aggregator("a2"))
    first, second = aggregator_table(infos, None)[1:]
    assert first.endswith("20% of 1.2 GiB/s")
    assert "%" not in second


def test_a_tenants_use_is_unknown_until_it_was_measured() -> None:
    limits = {"loss_limit": 0.05, "queued_max": 9, "waiting": 1, "running": 2, "pool_cpu": 8.0}
    idle = TenantInfo(tenant="new", cpu_fraction=0.25, cpu=1.0, **limits)  # type: ignore[arg-type]
    busy = TenantInfo(
        tenant="old", cpu_fraction=0.5, cpu=1.5, used_cpu=1.25, used_slots=12.5, measured=2,
        loss=0.067, beyond=1, **limits,  # type: ignore[arg-type]
    )  # fmt: skip
    rows = [line.split() for line in tenant_table((busy, idle), 80)[1:]]
    assert rows == [
        ["new", "1.00/2.00", "-", "-", "-", "0.05", "0", "2", "1/9"],
        ["old", "1.50/4.00", "1.25", "12.50", "6.7%", "0.05", "1", "2", "1/9"],
    ]


# The screen ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("height", [8, 10, 24, 60, 200])
@pytest.mark.parametrize("pool", [0, 3, 100])
@pytest.mark.parametrize("count", [0, 3, 100])
def test_a_screen_of_any_size_shows_both_parts(height: int, pool: int, count: int) -> None:
    jobs = [running(f"r{n}") for n in range(count)] + [failed(f"f{n}") for n in range(10)]
    infos = tuple(aggregator(f"a{n}") for n in range(pool))
    text = screen(Seen(listed(*jobs, hidden=990), infos), 80, height)
    assert len(text) <= height
    assert all(cell_len(line) <= 80 for line in text)
    heads = [line.split()[0] for line in text if line and line.split()[0] in ("JOB", "AGGREGATOR")]
    assert heads == ["JOB", *(["AGGREGATOR"] if pool else [])]


def test_a_hundred_jobs_leave_room_for_the_pool_and_say_how_many_are_not_shown() -> None:
    jobs = [running(f"r{n}") for n in range(100)]
    infos = tuple(aggregator(f"a{n}") for n in range(8))
    text = screen(Seen(listed(*jobs), infos), 80, 24)
    begin = next(n for n, line in enumerate(text) if line.startswith("AGGREGATOR"))
    shown = sum(line.startswith("r") for line in text)
    assert f"and {100 - shown} more" in text[:begin]
    assert shown >= 8
    assert len(text) - begin > 5


def test_a_master_that_does_not_answer_is_named_above_the_last_figures() -> None:
    text = screen(Seen(listed(made.running("k")), (), "nobody answers"), 80, 24)
    assert "no answer: nobody answers" in text
    assert any(line.startswith("k ") for line in text)


def test_an_asynchronous_job_is_described_with_the_times_of_its_iterations() -> None:
    times = {"worker_s": 0.305, "uplink_s": 0.165, "server_s": 0.0046, "downlink_s": 0.166}
    spec = JobSpec(id="a", consistency="asynchronous", program=("x",))
    for workers, more in ((1, ""), (3, "; 3 trained, their waiting left out")):
        steps = StepProfile(turns=1041, workers=workers, **times)
        record = JobRecord(spec=spec, state="running", submitted_s=NOW_S, steps=steps)
        said = (
            "Times:        0.305 s computing, 0.165 s up, 0.0046 s at the server, 0.166 s down "
            f"(1,041 iterations{more})"
        )
        assert said in described(JobInfo(job=record), NOW_S)
