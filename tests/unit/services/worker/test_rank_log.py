"""The log of a rank: bounded, whole wherever it is cut, and never a reason for the rank to fail."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.waiting import eventually

from slackwater.common.base import limits
from slackwater.services.worker.environment import short_of_room
from slackwater.services.worker.processes import Intent, RankFiles, find
from slackwater.services.worker.pruning import Pruner, Retention
from slackwater.services.worker.ranklog import RankLog

LOG_BYTES_MAX = 8 * 1024**2


def run(state_dir: Path, script: str, job: str = "j1") -> RankFiles:
    files = RankFiles(state_dir, job, 0)
    intent = Intent(job=job, rank=0, workers=1, program=("/bin/sh", "-c", script))
    files.launch(intent, {}, LOG_BYTES_MAX).wait(60)
    eventually(files.logged, "what it printed is in its log")
    return files


def whole(log: RankLog, place: int = 0, bytes_max: int = 1024**2) -> tuple[int, bytes]:
    """Read as a follower does that asks from `place` on; return where that began, too."""
    first, found = -1, b""
    while (piece := log.read(place, bytes_max)).data:
        first = piece.start if first < 0 else first
        found += piece.data
        place = piece.start + len(piece.data)
    return first, found


def parts(folder: Path, *contents: bytes) -> RankLog:
    """Write parts as a logger leaves them that has removed nothing yet, or only its first bytes."""
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    start = 0
    for content in contents[:-1]:
        (folder / f"rank0.log-{start}").write_bytes(content)
        start += len(content)
    (folder / "rank0.log").write_bytes(contents[-1])
    return RankLog(folder / "rank0.log")


# Pieces -------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    contents=st.lists(st.binary(min_size=1, max_size=60), min_size=1, max_size=3),
    cuts=st.lists(st.integers(1, 40), min_size=1, max_size=20),
    begun=st.integers(0, 200),
)
def test_pieces_of_any_length_give_the_same_bytes(
    tmp_path_factory: pytest.TempPathFactory, contents: list[bytes], cuts: list[int], begun: int
) -> None:
    log = parts(tmp_path_factory.getbasetemp() / "pieces", *contents)
    printed = b"".join(contents)
    place, found, number = begun, b"", 0
    while (piece := log.read(place, cuts[number % len(cuts)])).data:
        assert piece.start == place
        assert (piece.begin, piece.end) == (0, len(printed))
        found += piece.data
        place += len(piece.data)
        number += 1
    assert found == printed[begun:]


@settings(max_examples=150, deadline=None)
@given(
    lines=st.lists(st.text("ab", max_size=5), max_size=12),
    open_end=st.text("c", max_size=3),
    wanted=st.integers(0, 14),
    cut=st.integers(0, 60),
)
def test_a_tail_is_the_last_lines(
    tmp_path_factory: pytest.TempPathFactory,
    lines: list[str],
    open_end: str,
    wanted: int,
    cut: int,
) -> None:
    text = "".join(line + "\n" for line in lines) + open_end
    printed = text.encode()
    cut = min(cut, len(printed))
    contents = [printed[:cut], printed[cut:]] if 0 < cut < len(printed) else [printed]
    log = parts(tmp_path_factory.getbasetemp() / "tails", *contents)
    expected = "".join(text.splitlines(keepends=True)[-wanted:] if wanted else [])
    place = log.tail(wanted)
    assert (whole(log, place)[1] if wanted else b"") == expected.encode()


def test_a_tail_goes_back_over_many_blocks(tmp_path: Path) -> None:
    """The line before the last three is far longer than what is looked at at once."""
    text = b"first\n" + b"x" * 300_000 + b"\n" + b"y" * 200_000 + b"\nlast\n"
    log = parts(tmp_path, text[:250_000], text[250_000:])
    assert log.tail(1) == len(text) - 5
    assert log.tail(3) == 6
    assert log.tail(4) == log.tail(400) == 0


@pytest.mark.parametrize(
    ("printed", "seen"),
    [
        ("\x1b[31mValueError\x1b[0m: no such file\r\n", "ValueError: no such file"),
        ("10 %\r20 %\r100 %\n", "100 %"),
        ("\x1b]0;a title\x07\x1b[?2004lexit\r\n\x1b[?2004h", "exit"),
        ("well\n\x00\x07\n", "well"),
    ],
)
def test_the_last_line_is_what_a_person_sees_of_it(tmp_path: Path, printed: str, seen: str) -> None:
    log = parts(tmp_path, printed.encode())
    assert log.last_line() == seen


def test_a_rank_without_a_log_has_printed_nothing(tmp_path: Path) -> None:
    log = RankLog(tmp_path / "nowhere" / "rank0.log")
    assert (log.end(), log.tail(10), log.last_line(), log.newest()) == (0, 0, "", (0, 0))


# The logger ---------------------------------------------------------------------------------------


def test_a_rank_that_prints_without_end_stays_within_the_bound(tmp_path: Path) -> None:
    """Some ten times the bound; its last line is still why it failed. Takes a second or two: the
    bytes are really written."""
    script = (
        f"yes 'step 1 of 1' | head -c {10 * LOG_BYTES_MAX}; echo; echo no such file >&2; exit 3"
    )
    files = run(tmp_path, script)
    assert files.outcome() == (3, "no such file")
    kept = [files.path("log"), *files.folder.glob("rank0.log-*")]
    on_disk = sum(path.stat().st_size for path in kept)
    assert 0 < on_disk <= LOG_BYTES_MAX
    assert files.log.end() == 10 * LOG_BYTES_MAX + len("\nno such file\n")
    first, found = whole(files.log)
    assert first == files.log.read(0, 1).begin == files.log.end() - on_disk
    assert len(found) == on_disk


def test_a_reader_who_keeps_up_sees_every_line_once_through_all_rotations(tmp_path: Path) -> None:
    """Takes a second or two: some eight rotations pass."""
    count = 3_000_000
    files = RankFiles(tmp_path, "j1", 0)
    script = f"for i in $(seq 0 {count // 30} {count - 1}); do "
    script += f"seq $((i + 1)) $((i + {count // 30})); sleep 0.02; done"
    intent = Intent(job="j1", rank=0, workers=1, program=("/bin/sh", "-c", script))
    child = files.launch(intent, {}, LOG_BYTES_MAX)
    place, found = 0, []
    while True:
        over = child.poll() is not None and files.logged()
        piece = files.log.read(place, 1024**2)
        assert piece.start == place, "something was removed before it was read"
        found.append(piece.data)
        place += len(piece.data)
        if over and not piece.data:
            break
    assert b"".join(found) == b"".join(b"%d\n" % n for n in range(1, count + 1))
    assert any(files.folder.glob("rank0.log-*")), "it was rotated"


def test_a_full_disk_takes_lines_and_not_the_job(tmp_path: Path) -> None:
    """Lines are dropped without an error to the program that prints them, and its exit code is kept
    even if only a file name has room."""
    files = RankFiles(tmp_path, "j1", 0)
    files.folder.mkdir(parents=True)
    for name in ("log", "exit.new"):
        files.path(name).symlink_to("/dev/full")
    script = "set -e; i=0; while [ $i -lt 300 ]; do echo line $i; i=$((i + 1)); done"
    files = run(tmp_path, script)
    assert not files.path("exit").exists()
    assert files.path("exit-0").exists()
    assert files.outcome() == (0, "")
    assert files.ended_s() > 0.0
    assert [found.state for found in find(tmp_path)] == ["exited"]


def test_a_failure_on_a_full_disk_keeps_its_code(tmp_path: Path) -> None:
    files = RankFiles(tmp_path, "j1", 0)
    files.folder.mkdir(parents=True)
    files.path("exit.new").symlink_to("/dev/full")
    assert run(tmp_path, "echo why; exit 7").outcome() == (7, "why")


def test_lines_are_there_when_they_are_printed(tmp_path: Path) -> None:
    """A logger that waited for a full block would show a training program's lines hours late."""
    files = RankFiles(tmp_path, "j1", 0)
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    script = f"echo one; read line < {gate}; echo two"
    intent = Intent(job="j1", rank=0, workers=1, program=("/bin/sh", "-c", script))
    child = files.launch(intent, {}, LOG_BYTES_MAX)
    eventually(lambda: files.log.read(0, 100).data == b"one\n", "the first line")
    assert child.poll() is None
    gate.write_text("go\n")
    assert child.wait(30) == 0
    eventually(lambda: files.log.read(4, 100).data == b"two\n", "the second line")


def test_the_logger_lives_through_the_signals_to_its_rank_and_ends_with_it(tmp_path: Path) -> None:
    files = RankFiles(tmp_path, "j1", 0)
    script = "trap 'echo told to end; exit 5' TERM; echo up; while :; do sleep 0.05; done"
    intent = Intent(job="j1", rank=0, workers=1, program=("/bin/sh", "-c", script))
    child = files.launch(intent, {}, LOG_BYTES_MAX)
    eventually(lambda: files.log.end() > 0, "it runs")
    identity = files.identity()
    assert identity is not None
    assert not files.logged()
    files.signal_group(identity, kill=False)
    child.wait(30)
    eventually(files.logged, "the logger ended")
    assert files.log.last_line() == "told to end"


# Kept logs ----------------------------------------------------------------------------------------


NOTHING = Retention(jobs=0, seconds=0.0, nbytes=0)


def ended_job(state_dir: Path, job: str, ended_s: float, nbytes: int = 0) -> None:
    files = RankFiles(state_dir, job, 0)
    files.folder.mkdir(parents=True)
    files.path("intent.json").write_bytes(b"{}")
    files.path("log").write_bytes(bytes(nbytes))
    files.forget()
    os.utime(files.folder, (ended_s, ended_s))


def left(state_dir: Path) -> set[str]:
    return {folder.name for folder in (state_dir / "jobs").iterdir()}


@pytest.mark.parametrize(
    ("keep", "removed"),
    [
        (Retention(jobs=2, seconds=1e9, nbytes=10**9), {"j1", "j2"}),
        (Retention(jobs=9, seconds=60.0, nbytes=10**9), {"j1", "j2"}),
        (Retention(jobs=9, seconds=1e9, nbytes=250), {"j1", "j2"}),
        (Retention(jobs=9, seconds=1e9, nbytes=10**9), set()),
    ],
    ids=["count", "age", "bytes", "all"],
)
def test_files_of_ended_jobs_are_bounded(
    tmp_path: Path, keep: Retention, removed: set[str]
) -> None:
    jobs = {f"j{n}" for n in range(1, 5)}
    for n in range(1, 5):
        ended_job(tmp_path, f"j{n}", ended_s=n * 25.0, nbytes=100)
    assert Pruner(tmp_path, keep).prune(125.0) == removed
    assert left(tmp_path) == jobs - removed


def test_files_of_a_job_of_which_the_master_does_not_know_all_are_kept(tmp_path: Path) -> None:
    ended_job(tmp_path, "j1", ended_s=1.0)
    RankFiles(tmp_path, "j1", 1).path("intent.json").write_bytes(b"{}")
    assert Pruner(tmp_path, NOTHING).prune(1e6) == frozenset()
    assert left(tmp_path) == {"j1"}


@pytest.fixture
def no_rights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a state folder of an account without root's rights, which this process has then."""
    if os.geteuid() != 0:
        yield tmp_path
        return
    monkeypatch.chdir(tmp_path)  # The folders above are not to be passed.
    os.chown(tmp_path, 65534, 65534)
    os.seteuid(65534)
    yield Path()
    os.seteuid(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file another account's")
def test_a_folder_without_rights_does_not_keep_others_from_being_pruned(no_rights: Path) -> None:
    """Red before: the first chmod 0 of a job's account ended the worker service."""
    for n in range(1, 5):
        ended_job(no_rights, f"j{n}", ended_s=float(n))
    inside, whole = no_rights / "jobs/j2/own/closed", no_rights / "jobs/j3"
    (inside / "deep").mkdir(parents=True)
    os.seteuid(0)
    for folder in (inside, whole):
        os.chown(folder, 4711, 4711)
        folder.chmod(0)
    os.seteuid(65534)
    pruner = Pruner(no_rights, NOTHING)
    with structlog.testing.capture_logs() as logs:
        assert pruner.prune(1e6) == {"j1", "j4"}
        assert pruner.prune(1e6) == frozenset()
    assert [line["job"] for line in logs] == ["j2", "j3"]
    assert "Permission denied" in logs[0]["reason"]
    assert left(no_rights) == {"j2", "j3"}
    assert RankFiles(no_rights, "j2", 0).path("reported").exists()
    os.seteuid(0)
    whole.chmod(0o755)
    os.chown(whole, 65534, 65534)
    os.seteuid(65534)
    assert pruner.prune(1e6) == {"j3"}


def test_a_program_cannot_keep_its_files_by_closing_their_folders(no_rights: Path) -> None:
    """Go's module cache, for one, has no folder that may be written to."""
    ended_job(no_rights, "j1", ended_s=1.0)
    inside = no_rights / "jobs/j1/code-1/pkg/mod"
    inside.mkdir(parents=True)
    (inside / "file").touch()
    inside.chmod(0o555)
    inside.parent.chmod(0)
    assert Pruner(no_rights, NOTHING).prune(1e6) == {"j1"}
    assert not left(no_rights)


def test_a_child_that_left_its_group_does_not_hold_up_the_end(tmp_path: Path) -> None:
    """Its pipe stays open; the rank's outcome is known all the same."""
    files = RankFiles(tmp_path, "j1", 0)
    script = "setsid sleep 5 & echo done"
    intent = Intent(job="j1", rank=0, workers=1, program=("/bin/sh", "-c", script))
    child: subprocess.Popen[bytes] = files.launch(intent, {}, LOG_BYTES_MAX)
    assert child.wait(30) == 0
    assert not files.logged()
    eventually(lambda: files.log.end() > 0, "the line is there")
    assert files.outcome()[0] == 0


def test_a_disk_that_gets_full_is_noticed_and_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "WORKER_ROOM_BYTES", 0)
    assert short_of_room(tmp_path) == ""
    monkeypatch.setattr(limits, "WORKER_ROOM_BYTES", 2**70)
    assert "lower jobs_kept_bytes or log_bytes_max" in short_of_room(tmp_path)
