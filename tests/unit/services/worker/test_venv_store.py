"""The virtual environments that a node keeps: unpacked once for all jobs, and never taken from one
that runs."""

import asyncio
import io
import shutil
from pathlib import Path

import pytest
from tests.unit.services.worker.test_code_store import Counted, payload_of
from tests.venvs import environment

from slackwater.common.base.clock import LiveClock
from slackwater.common.store.venv_packs import pack
from slackwater.schemas.jobs import VENV_OBJECT
from slackwater.services.worker import venvs
from slackwater.services.worker.code import CodeMissing
from slackwater.services.worker.venvs import VenvStore

LARGE = 2**40


async def stored(folder: Path, objects: Counted, name: str = "venv") -> str:
    venv = environment(folder / name, folder / "base")
    (venv / "of").write_text(name)
    made = pack(venv)
    await objects.put(VENV_OBJECT + made.digest, io.BytesIO(payload_of(made)))
    return made.digest


async def test_jobs_that_ask_at_once_share_one_copy(tmp_path: Path) -> None:
    objects = Counted(LiveClock())
    digest = await stored(tmp_path, objects)
    store = VenvStore(tmp_path, objects, LARGE)
    await asyncio.gather(*(store.provide(digest) for _ in range(5)))
    assert objects.gets == 1
    assert (Path(store.folder(digest)) / "of").read_text() == "venv"
    assert [path.name for path in (tmp_path / "venvs").iterdir()] == [digest[:32]]


async def test_without_an_environment_nothing_is_fetched(tmp_path: Path) -> None:
    store = VenvStore(tmp_path, None, LARGE)
    await store.provide("")
    assert store.folder("") == ""


async def test_those_used_longest_ago_go_but_never_one_in_use(tmp_path: Path) -> None:
    objects = Counted(LiveClock())
    first, second, third = [await stored(tmp_path, objects, name) for name in ("a", "b", "c")]
    store = VenvStore(tmp_path, objects, 0)

    def there() -> set[str]:
        assert not list((tmp_path / "venvs").glob(".*"))
        return {each for each in (first, second, third) if Path(store.folder(each)).exists()}

    store.hold(("j", 0), first)
    await store.provide(first)
    await store.provide(second)
    assert there() == {first, second}
    await store.provide(third)
    assert there() == {first, third}
    store.release(("j", 0))
    await store.provide(second)
    assert there() == {second}


async def test_within_the_bound_the_older_ones_stay(tmp_path: Path) -> None:
    objects = Counted(LiveClock())
    digests = [await stored(tmp_path, objects, name) for name in ("a", "b", "c")]
    store = VenvStore(tmp_path, objects, LARGE)
    for digest in digests:
        await store.provide(digest)
    kept = {path.name for path in (tmp_path / "venvs").iterdir()}
    assert kept == {each[:32] for each in digests}


@pytest.mark.parametrize("again", [False, True])
async def test_a_node_without_the_interpreter_says_so(tmp_path: Path, again: bool) -> None:
    """Also where the environment was unpacked while it still had it."""
    objects = Counted(LiveClock())
    digest = await stored(tmp_path, objects)
    store = VenvStore(tmp_path, objects, LARGE)
    if again:
        await store.provide(digest)
    shutil.rmtree(tmp_path / "base")
    with pytest.raises(CodeMissing, match=r"it needs Python 3.11 .* install it there, or submit"):
        await store.provide(digest)


async def test_one_that_is_not_stored_any_more_is_said(tmp_path: Path) -> None:
    store = VenvStore(tmp_path, Counted(LiveClock()), LARGE)
    with pytest.raises(CodeMissing, match="is not stored any more; submit the job again with --v"):
        await store.provide("0" * 64)
    assert not list((tmp_path / "venvs").iterdir())


async def test_a_damaged_pack_leaves_nothing(tmp_path: Path) -> None:
    objects = Counted(LiveClock())
    digest = await stored(tmp_path, objects)
    await objects.delete(VENV_OBJECT + digest)
    await objects.put(VENV_OBJECT + digest, io.BytesIO(b"not a pack"))
    with pytest.raises(CodeMissing, match="a pack of a virtual environment"):
        await VenvStore(tmp_path, objects, LARGE).provide(digest)
    assert not list((tmp_path / "venvs").iterdir())


def test_what_a_killed_service_left_is_removed(tmp_path: Path) -> None:
    left = tmp_path / "venvs" / ".abc.x"
    (left / "lib").mkdir(parents=True)
    (left / "lib").chmod(0o555)
    left.with_name(".abc.pack").write_text("half")
    VenvStore(tmp_path, None, LARGE).clean()
    assert not list((tmp_path / "venvs").iterdir())


def test_what_something_writes_to_still_is_left_to_the_next_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression of the design: a compiler that outlived its service would keep the next one from
    starting."""

    def not_empty(folder: Path) -> None:
        raise OSError(f"{folder}: directory not empty")

    (tmp_path / "venvs" / ".abc.x").mkdir(parents=True)
    monkeypatch.setattr(venvs, "remove", not_empty)
    VenvStore(tmp_path, None, LARGE).clean()
    assert list((tmp_path / "venvs").iterdir())
