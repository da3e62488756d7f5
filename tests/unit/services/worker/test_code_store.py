"""The packs of code that a node keeps: fetched once, believed by their digest alone."""

import asyncio
import io
from pathlib import Path
from typing import IO

import pytest

from slackwater.common.base.clock import LiveClock
from slackwater.common.store.code_packs import pack
from slackwater.common.store.objects import MemoryObjects
from slackwater.common.store.packs import Pack
from slackwater.services.worker.code import CodeMissing, CodeStore


class Counted(MemoryObjects):
    gets = 0

    async def get(self, name: str, target: IO[bytes]) -> bool:
        self.gets += 1
        await asyncio.sleep(0.0)
        return await super().get(name, target)


def payload_of(pack: Pack) -> bytes:
    written = io.BytesIO()
    pack.write(written)
    return written.getvalue()


@pytest.fixture
def packed(tmp_path: Path) -> Pack:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "train.py").write_text("print(1)")
    return pack(folder)


def store_at(folder: Path, objects: MemoryObjects) -> CodeStore:
    (folder / "state" / "jobs").mkdir(parents=True)  # The worker service makes it.
    return CodeStore(folder / "state", objects)


def trains(store: CodeStore, job: str, packed: Pack) -> str:
    return Path(store.folder(job, packed.digest, ""), "train.py").read_text()


async def test_jobs_that_ask_at_once_fetch_it_once(tmp_path: Path, packed: Pack) -> None:
    objects = Counted(LiveClock())
    await objects.put(packed.digest, io.BytesIO(payload_of(packed)))
    store = store_at(tmp_path, objects)
    await asyncio.gather(*(store.provide(f"j{n}", packed.digest) for n in range(5)))
    assert objects.gets == 1
    assert {trains(store, f"j{n}", packed) for n in range(5)} == {"print(1)"}


async def test_bytes_that_are_not_the_digest_s_are_never_kept(tmp_path: Path, packed: Pack) -> None:
    """Regression: they were kept before they were compared, and found again for ever."""
    objects = Counted(LiveClock())
    await objects.put(packed.digest, io.BytesIO(payload_of(packed)[:-9]))
    store = store_at(tmp_path, objects)
    for _ in range(2):
        with pytest.raises(CodeMissing, match="cannot be had"):
            await store.provide("j", packed.digest)
    assert objects.gets == 2
    assert not list((tmp_path / "state" / "packs").iterdir())


async def test_a_kept_pack_that_was_damaged_is_fetched_again(tmp_path: Path, packed: Pack) -> None:
    objects = Counted(LiveClock())
    await objects.put(packed.digest, io.BytesIO(payload_of(packed)))
    store = store_at(tmp_path, objects)
    await store.provide("first", packed.digest)
    (kept,) = (tmp_path / "state").rglob("*.tar.gz")
    kept.write_bytes(b"not a pack")
    await store.provide("second", packed.digest)
    assert trains(store, "second", packed) == "print(1)"
    assert objects.gets == 2
    assert kept.read_bytes() == payload_of(packed)


async def test_a_pack_that_another_removes_meanwhile_disturbs_nobody(
    tmp_path: Path, packed: Pack
) -> None:
    """Regression: the sizes of all packs were read, and one that was gone by then failed the job.
    A link to nowhere stands for it."""
    objects = Counted(LiveClock())
    await objects.put(packed.digest, io.BytesIO(payload_of(packed)))
    packs = tmp_path / "state" / "packs"
    packs.mkdir(parents=True)
    (packs / "gone.tar.gz").symlink_to(tmp_path / "nowhere")
    store = store_at(tmp_path, objects)
    await store.provide("j", packed.digest)
    assert trains(store, "j", packed) == "print(1)"
