"""The journal as a table, and a replay by a program's own words and exit code."""

import io
from pathlib import Path

import pytest

from slackwater.agent.journal import REPLAY, REPLAYED, Entry, Journal, assignment
from slackwater.cli import replay
from slackwater.common.base.errors import Rejected
from slackwater.schemas.jobs import JobSpec

ENTRY = Entry(
    iteration=0, what="start", workers=2, assignment=assignment(5, 2), virtual_ranks=5, seed=3,
    m=8, rate=0.1, digest="ab",
)  # fmt: skip


def spec(folder: Path, *words: str) -> JobSpec:
    return JobSpec(id="j", program=("python", "-c", *words), folder=str(folder))


def test_the_journal_is_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = spec(tmp_path, "")
    Journal(tmp_path / "checkpoints" / "j" / "journal.jsonl").append(ENTRY)
    replay.show_journal(job, json=False)
    heads, row = capsys.readouterr().out.splitlines()
    assert heads.split() == ["ITERATION", "WHAT", "WORKERS", "VIRTUAL", "RANKS", *["M", "S"],
                             "RATE", "DIGEST"]  # fmt: skip
    assert row.split() == ["0", "start", "2", "0-2", "3-4", "8", "1", "0.1", "ab"]


def test_a_job_without_a_journal_says_where_it_would_be(tmp_path: Path) -> None:
    with pytest.raises(Rejected, match=r"checkpoints/j/journal\.jsonl"):
        replay._entries(spec(tmp_path, ""), replay.path_of(spec(tmp_path, "")))


@pytest.mark.parametrize(
    ("program", "code"),
    [
        (f"import os; print('{REPLAYED}, as', os.environ['{REPLAY}'])", 0),
        ("print('I know of no replay')", 1),
        ("raise SystemExit(7)", 7),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 1),
    ],
)
def test_a_replay_ends_as_its_program_and_with_1_where_that_followed_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, code: int
) -> None:
    """The program runs alone: it must not take itself for a rank of the job."""
    monkeypatch.setenv("SLACKWATER_JOB", "j")
    alone = "import os; assert 'SLACKWATER_JOB' not in os.environ; "
    shown = io.StringIO()
    assert replay._run(spec(tmp_path, alone + program), tmp_path / "here", shown) == code
    assert code or str(tmp_path / "here") in shown.getvalue()
