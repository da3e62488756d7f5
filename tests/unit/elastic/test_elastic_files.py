"""The files of an elastic run, held to what a host expects of them, and read after damage."""

from pathlib import Path

import numpy as np
import pytest
from tests.sim.elastic import Disk, Kills, MemoryFiles

from slackwater.common.base.errors import Rejected
from slackwater.elastic.files import HostFolder, RunJournal
from slackwater.elastic.host import Batch
from slackwater.schemas.elastic import BatchTold, Completion, Entry, ExecutorPlaced, RunBegun

ENTRIES: list[Entry] = [
    RunBegun(run="r1", program="P"),
    ExecutorPlaced(executor=3, move=1, rank=0),
    BatchTold(rank=0, number=1, completions=(Completion(order=0, result=b"\xff\x00"),)),
]


@pytest.fixture(params=["folder", "memory"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> HostFolder | MemoryFiles:
    if request.param == "folder":
        return HostFolder(tmp_path, "r1", 2)
    from random import Random

    return MemoryFiles(Disk(), Kills(Random(0), 0.0))


def test_the_newest_sealed_batch_is_found(files: HostFolder | MemoryFiles) -> None:
    assert files.sealed() is None
    for number in (1, 2):
        deltas = {"w": np.full((2, 3), number, np.float32)}
        done = (Completion(order=number, result=b"x"),)
        files.seal(Batch(number, done, deltas, {"w": number + 1}))
    found = files.sealed()
    assert found is not None
    assert (found.number, found.completions) == (2, (Completion(order=2, result=b"x"),))
    assert found.counts == {"w": found.number + 1}
    assert found.deltas["w"].dtype == np.float32
    assert found.deltas["w"].tolist() == [[2] * 3] * 2


def test_states_count_by_executor_move_and_batch(files: HostFolder | MemoryFiles) -> None:
    for executor, move, number in ((1, 1, 3), (1, 1, 5), (1, 2, 6), (2, 1, 5)):
        files.keep(executor, move, number, f"{executor}{move}{number}".encode())
    assert files.kept(1, 1, 4) == b"113"
    assert files.kept(1, 1, 9) == b"115"
    assert files.kept(1, 1, 2) is None
    assert files.kept(1, 3, 9) is None
    files.settle(5)
    assert files.kept(1, 2, 9) is None, "its batch was never sealed"
    files.forget(1)
    assert files.kept(1, 1, 9) is None
    assert files.kept(2, 1, 9) == b"215"


def test_a_state_stays_until_the_next_place_of_its_executor_is_written(tmp_path: Path) -> None:
    journal = RunJournal(tmp_path)
    journal.write(RunBegun(run="r1", program="P"))
    for move in (1, 2, 3):
        for executor in (1, 11):
            journal.keep("r1", executor, move, b"%d" % move)
    journal.write(ExecutorPlaced(executor=1, move=3, rank=None, state=3))
    journal.write(ExecutorPlaced(executor=11, move=3, rank=0, state=2))
    left = sorted(path.name for path in (tmp_path / "run-r1" / "states").iterdir())
    assert left == ["1-3", "11-1", "11-2", "11-3"]
    assert journal.state("r1", 1, 3) == b"3"
    journal.close()


def test_nothing_is_found_after_the_end(files: HostFolder | MemoryFiles) -> None:
    files.keep(1, 1, 3, b"113")
    files.seal(Batch(3, (), {}))
    files.remove()
    again = (
        files if isinstance(files, MemoryFiles) else HostFolder(files._folder.parents[1], "r1", 2)
    )
    assert again.sealed() is None
    assert again.kept(1, 1, 9) is None


def test_the_journal_alone_is_left_of_a_run_that_ended(tmp_path: Path) -> None:
    """Red before: the last batch of each host, as large as the tables, and executors' states lay
    there until the next run of the same name."""
    journal = RunJournal(tmp_path)
    for entry in ENTRIES:
        journal.write(entry)
    journal.keep("r1", 3, 1, b"state")
    hosts = [HostFolder(tmp_path, "r1", rank) for rank in (0, 1)]
    for host in hosts:
        host.seal(Batch(1, (), {}))
    journal.close()
    hosts[0].remove()
    assert hosts[1].sealed() is not None, "it may still be at work"
    journal.remove_states("r1")
    hosts[1].remove()
    assert [path.name for path in tmp_path.iterdir()] == ["journal.jsonl"]
    assert RunJournal(tmp_path).entries() == ENTRIES


def test_a_seal_removes_states_that_newer_ones_replace(tmp_path: Path) -> None:
    files = HostFolder(tmp_path, "r1", 0)
    for number in (1, 2, 3):
        files.keep(7, 1, number, b"s")
        files.seal(Batch(number, (), {}))
    assert sorted(path.name for path in (tmp_path / "run-r1" / "host-0").iterdir()) == [
        "7-1-3", "batch",
    ]  # fmt: skip


def test_a_journal_is_read_back_without_half_a_line(tmp_path: Path) -> None:
    journal = RunJournal(tmp_path)
    for entry in ENTRIES:
        journal.write(entry)
    journal.close()
    path = tmp_path / "journal.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"t":"told","ra')
    again = RunJournal(tmp_path)
    assert again.entries() == ENTRIES
    assert path.read_bytes() == whole, "what comes next begins a line"
    again.write(ENTRIES[1])
    assert again.entries() == [*ENTRIES, ENTRIES[1]]


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    journal = RunJournal(tmp_path)
    for entry in ENTRIES:
        journal.write(entry)
    path = tmp_path / "journal.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"placed"', b'"plaxed"'))
    with pytest.raises(Rejected, match=r"line 2: .*take the file away"):
        journal.entries()


def test_a_new_run_ends_what_there_was_of_others(tmp_path: Path) -> None:
    journal = RunJournal(tmp_path)
    for entry in ENTRIES:
        journal.write(entry)
    journal.keep("r1", 3, 1, b"state")
    HostFolder(tmp_path, "r1", 0)
    assert journal.state("r1", 3, 1) == b"state"
    journal.write(RunBegun(run="r2", program="P"))
    assert journal.entries() == [RunBegun(run="r2", program="P")]
    assert not (tmp_path / "run-r1").exists()
    with pytest.raises(Rejected, match="the state of executor 3 is lost"):
        journal.state("r1", 3, 1)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Rejected, match="--checkpoint"):
        RunJournal(tmp_path / "file" / "folder")
    with pytest.raises(Rejected, match="--checkpoint"):
        HostFolder(tmp_path / "file", "r", 0)
