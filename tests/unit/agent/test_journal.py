"""The journal of an elastic job: appended to, read back, compared with a replay."""

from pathlib import Path

import msgspec
import pytest

from slackwater.agent.journal import Entry, Journal, assignment, first_what, last_run, unlike
from slackwater.common.base.errors import Rejected

ENTRY = Entry(
    iteration=40, what="resize", workers=2, assignment=assignment(5, 2), virtual_ranks=5, seed=3,
    m=8, s=1, rate=0.1, node="n1", digest="ab",
)  # fmt: skip


def with_(**changes: object) -> Entry:
    return msgspec.structs.replace(ENTRY, **changes)


def test_what_is_appended_is_read_back_and_half_a_line_is_left_out(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "job" / "journal.jsonl")
    assert journal.entries() == []
    journal.append(ENTRY)
    journal.append(with_(what="end"))
    with journal.path.open("ab") as file:
        file.write(b'{"iteration":41,"wha')
    assert journal.entries() == [ENTRY, with_(what="end")]
    assert ENTRY.assignment == ((0, 3), (3, 5))


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    journal.append(ENTRY)
    journal.path.write_bytes(b"{}\n" + journal.path.read_bytes())
    with pytest.raises(Rejected, match="line 1"):
        journal.entries()


def test_a_job_that_is_run_again_begins_a_run_of_its_own() -> None:
    entries = [with_(what="start", iteration=0), ENTRY, with_(what="start", iteration=0), ENTRY]
    assert last_run(entries) == entries[2:]


def test_a_process_of_rank_0_begins_as_the_journal_ended() -> None:
    start, pause = with_(what="start", iteration=0), with_(what="pause")
    assert first_what([], 0, "n1") == "start"
    assert first_what([start, ENTRY], 0, "n1") == "start"  # It is run again.
    assert first_what([start], 40, "n1") == "recovery"
    assert first_what([start, pause], 40, "n1") == "resume"
    assert first_what([start, pause], 40, "n2") == "move"


def test_a_replay_that_differs_says_in_what() -> None:
    assert unlike(ENTRY, with_(workers=1, node="n2", m=0)) == ""
    assert unlike(ENTRY, with_(rate=0.2)) == "rate is 0.2, the journal says 0.1"
    assert unlike(ENTRY, with_(seed=4, digest="cd")) == "seed is 4, the journal says 3"
    assert "digest is cd" in unlike(ENTRY, with_(digest="cd"))
