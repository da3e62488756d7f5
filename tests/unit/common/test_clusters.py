"""Several clusters of one account on one machine: names, addresses, what a killed one leaves."""

import os
import stat
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slackwater.common.base.errors import DecodeRejected, Rejected, Unavailable
from slackwater.common.base.file_lock import FileLock
from slackwater.common.bus import local_clusters
from slackwater.common.bus.access import address_file, clusters_folder
from slackwater.common.embedded import leftovers, logs
from slackwater.console import where
from slackwater.schemas.machine import LocalCluster, ServiceStatus


@pytest.fixture(autouse=True)
def _account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLACKWATER_URL", "NATS_URL", "SLACKWATER_CLUSTER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def _entry(name: str) -> LocalCluster:
    path = str(address_file(name))
    return LocalCluster(name=name, pid=os.getpid(), started_s=1e9, address_file=path, log_dir="/l")


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_commands_find_the_only_cluster_and_its_token() -> None:
    with pytest.raises(Unavailable, match="no cluster is known"):
        where.resolve(None)
    own = "nats://0123abcd@127.0.0.1:4222"
    with local_clusters.listed(_entry("blue")) as blue:
        with pytest.raises(Unavailable, match="cluster blue is starting: try again"):
            where.resolve(None)
        blue.reachable(own)
        assert _mode(address_file("blue")) == 0o600
        assert _mode(address_file("blue").parent) == 0o700
        assert where.resolve(None) == own
        assert where.resolve("nats://127.0.0.1:4222/") == own
        assert where.resolve("nats://127.0.0.1:4223") == "nats://127.0.0.1:4223"
    with pytest.raises(Unavailable):
        where.resolve(None)


def test_of_several_clusters_default_is_meant_or_one_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with local_clusters.listed(_entry("blue")) as blue, local_clusters.listed(_entry("red")) as red:
        blue.reachable("nats://b@127.0.0.1:1")
        red.reachable("nats://r@127.0.0.1:2")
        with pytest.raises(Rejected, match="2 clusters run here: blue, red; choose one"):
            where.resolve(None)
        with pytest.raises(Rejected, match="no cluster 'green' runs here; those that run: blue, r"):
            local_clusters.chosen("green")
        monkeypatch.setenv("SLACKWATER_CLUSTER", "red")
        assert where.resolve(None) == "nats://r@127.0.0.1:2"
        monkeypatch.setenv("NATS_URL", "nats://elsewhere:4222")
        assert where.resolve(None) == "nats://r@127.0.0.1:2"
        assert where.resolve("nats://127.0.0.1:1") == "nats://b@127.0.0.1:1"
        monkeypatch.setenv("SLACKWATER_URL", "nats://127.0.0.1:1")
        assert where.resolve(None) == "nats://b@127.0.0.1:1"
        for name in ("SLACKWATER_URL", "NATS_URL", "SLACKWATER_CLUSTER"):
            monkeypatch.delenv(name)
        with local_clusters.listed(_entry("default")) as default:
            default.reachable("nats://d@127.0.0.1:3")
            assert where.resolve(None) == "nats://d@127.0.0.1:3"
            assert [entry.name for entry in local_clusters.known()] == ["blue", "default", "red"]


def test_a_name_is_one_clusters_and_the_refusal_says_whose() -> None:
    with local_clusters.listed(_entry("blue")):
        with (
            pytest.raises(
                Rejected, match=rf"cluster blue runs already: process {os.getpid()}, sin"
            ),
            local_clusters.listed(_entry("blue")),
        ):
            raise AssertionError("it was let in")
        assert local_clusters.living("blue") is not None, "the refused one took nothing with it"
    with local_clusters.listed(_entry("blue")):
        pass


def test_what_a_killed_cluster_left_is_removed_by_whoever_looks() -> None:
    """Its lock went with it, its token is still there."""
    folder = clusters_folder() / "blue"
    with local_clusters.listed(_entry("blue")) as listed:
        listed.reachable("nats://secret@127.0.0.1:1")
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    assert b"secret" in (folder / "url").read_bytes()
    assert local_clusters.known() == []
    assert [path.name for path in folder.iterdir()] == ["lock"]


def test_an_entry_that_cannot_be_read_names_its_file() -> None:
    with local_clusters.listed(_entry("blue")):
        (clusters_folder() / "blue" / "cluster.json").write_text("{")
        with pytest.raises(DecodeRejected, match=r"blue/cluster\.json: .*; remove it"):
            local_clusters.known()


def test_an_entry_is_written_only_when_it_changed() -> None:
    with local_clusters.listed(_entry("blue")) as listed:
        path = clusters_folder() / "blue" / "cluster.json"
        before = path.stat().st_ino
        listed.tell(state="starting")
        assert path.stat().st_ino == before
        listed.tell(services=(ServiceStatus(name="nats", state="ready"),))
        (found,) = local_clusters.known()
        assert found == listed.entry
        assert found.services[0].state == "ready"


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.sets(st.sampled_from(["default", "a", "b", "c"]), min_size=1), st.data())
def test_the_choice_never_depends_on_who_came_first(names: set[str], data: st.DataObject) -> None:
    """The only one, else `default`, else nobody; whatever the order of their starts."""
    order = data.draw(st.permutations(sorted(names)))
    entries = [local_clusters.listed(_entry(name)) for name in order]
    opened = [entry.__enter__() for entry in entries]
    try:
        for number, listed in enumerate(opened):
            listed.reachable(f"nats://{order[number]}@127.0.0.1:{number + 1}")
        if len(names) == 1 or "default" in names:
            meant = "default" if "default" in names else order[0]
            assert local_clusters.chosen("").startswith(f"nats://{meant}@")
        else:
            with pytest.raises(Rejected, match="choose one"):
                local_clusters.chosen("")
    finally:
        for entry in entries:
            entry.__exit__(None, None, None)


def test_a_temporary_folder_is_removed_once_nobody_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    lives, killed = leftovers.own_folder(), leftovers.own_folder()
    (killed.path.parent / "token").write_text("secret")
    (tmp_path / "slackwater-others").mkdir()  # Without a lock: not one of these.
    killed.release()
    assert leftovers.sweep() == [killed.path.parent]
    assert leftovers.sweep() == []
    assert lives.path.exists()
    assert (tmp_path / "slackwater-others").exists()
    lives.release()


def test_a_lock_is_free_once_the_child_that_has_it_is_gone_too(tmp_path: Path) -> None:
    """The bus server of a supervisor that was killed still has its store open."""
    ours = FileLock(tmp_path / "lock")
    assert ours.take() == ""
    child = os.dup(ours.fd)  # Like a forked child's.
    ours.release()
    assert FileLock(tmp_path / "lock").take() == str(os.getpid())
    os.close(child)
    again = FileLock(tmp_path / "lock")
    assert again.take() == ""
    again.release()


def test_a_log_is_kept_within_bounds_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "master-m1.log"
    assert not logs.rotate(path, 100)
    with path.open("ab", buffering=0) as log:
        log.write(b"a" * 100)
        assert not logs.rotate(path, 100)
        log.write(b"b")
        assert logs.rotate(path, 100)
        log.write(b"next\n")
    assert path.read_bytes() == b"next\n"
    assert (tmp_path / "master-m1.log.1").read_bytes() == b"a" * 100 + b"b"


def test_an_entry_of_a_newer_release_can_be_read() -> None:
    entry = msgspec.to_builtins(_entry("blue")) | {"added": 1}
    assert msgspec.json.decode(msgspec.json.encode(entry), type=LocalCluster) == _entry("blue")
