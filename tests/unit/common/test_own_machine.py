"""Foundations of one machine's cluster: private files, a lock, restarts counted within a while."""

import multiprocessing
import os
import stat
from pathlib import Path

import pytest

from slackwater.common.base import limits
from slackwater.common.base.errors import ConfigRejected
from slackwater.common.base.file_lock import FileLock
from slackwater.common.base.private_files import (
    kept_token,
    own_folder,
    private_folder,
    write_private,
)
from slackwater.common.bus.access import carries_identity, shown
from slackwater.common.embedded.restarts import RecentEnds, described, quick_ends, too_often

DAY_S = 86_400.0


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_secret_is_private_whatever_was_there_before(tmp_path: Path) -> None:
    path = tmp_path / "url"
    path.write_text("old")
    path.chmod(0o666)
    (tmp_path / "url.new").write_text("a write that was cut short")
    (tmp_path / "url.new").chmod(0o666)
    write_private(path, "new")
    assert (path.read_text(), _mode(path)) == ("new", 0o600)
    assert [each.name for each in tmp_path.iterdir()] == ["url"]
    open_to_all = tmp_path / "folder"
    open_to_all.mkdir(mode=0o755)
    assert _mode(private_folder(open_to_all)) == 0o700


def test_a_folder_with_others_files_is_not_closed_to_them(tmp_path: Path) -> None:
    """`slackwater bus users /`, by root, shut the machine to everybody else."""
    shared = tmp_path / "etc"
    shared.mkdir()
    shared.chmod(0o755)
    assert _mode(own_folder(shared, "users.conf")) == 0o700, "nothing is in it"
    shared.chmod(0o755)
    (shared / "passwd").touch()
    with pytest.raises(ConfigRejected, match="holds other files, and others may look into it"):
        own_folder(shared, "users.conf")
    assert _mode(shared) == 0o755
    (shared / "users.conf").touch()
    assert _mode(own_folder(shared, "users.conf")) == 0o700, "it was ours before"
    with pytest.raises(ConfigRejected, match="is not a folder"):
        own_folder(shared / "passwd", "users.conf")


def test_what_is_not_a_file_is_never_replaced(tmp_path: Path) -> None:
    """Regression: a path of /dev/null, given by root, replaced the machine's null device."""
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ConfigRejected, match="fifo exists but is not a file: give another path"):
        write_private(tmp_path / "fifo", "text")
    assert (tmp_path / "fifo").is_fifo()


def test_a_token_is_kept_and_is_nobody_elses(tmp_path: Path) -> None:
    token = kept_token(tmp_path / "token")
    assert len(bytes.fromhex(token)) == 32
    assert _mode(tmp_path / "token") == 0o600
    (tmp_path / "token").chmod(0o644)
    assert kept_token(tmp_path / "token") == token
    assert _mode(tmp_path / "token") == 0o600
    assert kept_token(tmp_path / "other") != token
    (tmp_path / "short").write_text("abc")
    with pytest.raises(ConfigRejected, match=r"short: a token has 32 or more .* remove it"):
        kept_token(tmp_path / "short")


def test_an_address_shows_no_token() -> None:
    url = "nats://0123abcd@127.0.0.1:4222"
    assert carries_identity(url)
    assert shown(url) == "nats://127.0.0.1:4222"
    assert not carries_identity(shown(url))


def _take(path: Path, answer: "multiprocessing.Queue[str]") -> None:
    answer.put(FileLock(path).take())


def test_a_lock_names_its_holder_and_goes_with_it(tmp_path: Path) -> None:
    ours = FileLock(tmp_path / "lock")
    assert ours.take() == ""
    assert FileLock(tmp_path / "lock").take() == str(os.getpid())
    ours.release()
    spawning = multiprocessing.get_context("spawn")
    answer: multiprocessing.Queue[str] = spawning.Queue()
    other = spawning.Process(target=_take, args=(tmp_path / "lock", answer))
    other.start()
    assert answer.get(timeout=60) == ""
    other.join()
    assert ours.take() == "", "its process has ended"
    ours.release()


def test_ends_are_counted_within_a_while_and_not_for_ever() -> None:
    """Twenty-one ends in a year are not a reason to give up, in a minute they are."""
    ends = RecentEnds()
    most = limits.RESTARTS_MAX
    assert all(ends.add(n * 17 * DAY_S) == 1 for n in range(most + 1))
    in_a_minute = RecentEnds()
    counted = [in_a_minute.add(1000.0 + n * 2.0) for n in range(most + 1)]
    assert counted[-1] == most + 1
    assert too_often(21, described(-9)) == "ended 21 times within 60 s, the last time with signal 9"


def test_a_service_that_was_killed_is_started_anew_at_once_however_often() -> None:
    assert quick_ends(0, -9, settled=False) == quick_ends(3, -15, settled=False) == 0
    assert quick_ends(3, 1, settled=False) == quick_ends(3, -11, settled=False) == 4
    assert quick_ends(3, 1, settled=True) == 0
