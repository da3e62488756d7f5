"""Store code folders and virtual environments for the nodes that lack them."""

import asyncio
from collections.abc import Iterator
from tempfile import TemporaryFile
from typing import Final, NamedTuple

from slackwater.client.worker_service import Note, unnoted
from slackwater.common.base.errors import Rejected
from slackwater.common.shell.client import Client
from slackwater.common.store.packs import Pack, mebibytes
from slackwater.schemas.jobs import VENV_OBJECT, JobRecord

UNUSED_S: Final = 3600.0
"""Seconds after which a pack that no job names is removed: it was stored for a job that was to be
submitted next."""
PACKS_MAX: Final = 256
"""Packs of code that are stored at once, of jobs that the master knows."""
VENVS_MAX: Final = 32
"""Packs of virtual environments."""


class Sent(NamedTuple):
    """The packs that go to the nodes with a job."""

    code: Pack | None
    venv: Pack | None = None


async def store(client: Client, sent: Sent, note: Note = unnoted) -> None:
    """Store the packs, unless they are, after those that no job names any more were removed. Raises
    Rejected where too many jobs' packs are kept."""
    objects, now_s = client.objects, client.clock.now_s()
    packs = {
        prefix + pack.digest: pack
        for prefix, pack in (("", sent.code), (VENV_OBJECT, sent.venv))
        if pack is not None
    }
    known = await objects.names() if packs else {}
    named = await _named(client) if known else set()
    for name in [name for name in known if name not in named and name not in packs]:
        if now_s - known[name] > UNUSED_S:
            await objects.delete(name)
            del known[name]
    for name, pack in packs.items():
        if name not in known:
            _check_room(pack is sent.venv, known)
            await _put(client, name, pack, note)


def _check_room(is_venv: bool, known: dict[str, float]) -> None:
    """Raises Rejected."""
    stored = sum(name.startswith(VENV_OBJECT) == is_venv for name in known)
    most, what, option = PACKS_MAX, "packs of code", "--workdir"
    if is_venv:
        most, what, option = VENVS_MAX, "virtual environments", "--venv"
    if stored >= most:
        raise Rejected(
            f"{stored} {what} are stored for jobs, at most {most}: delete ended jobs "
            f"(`slackwater delete`), or submit without {option}"
        )


async def _put(client: Client, name: str, pack: Pack, note: Note) -> None:
    if name.startswith(VENV_OBJECT):
        said = f"{mebibytes(pack.nbytes)}, {len(pack.names):,} files"
        note(f"storing the virtual environment for the nodes ({said})")
    with TemporaryFile() as file:
        await asyncio.to_thread(pack.write, file)
        file.seek(0)
        await client.objects.put(name, file)


async def _named(client: Client) -> set[str]:
    """Collect the packs that jobs name, ended ones included."""
    found: set[str] = set()
    offset = 0
    while True:
        page = await client.job_page(offset=offset)
        found |= set(_names(page.jobs))
        offset += len(page.jobs)
        if not page.jobs or offset >= page.total:
            return found


def _names(jobs: tuple[JobRecord, ...]) -> Iterator[str]:
    for record in jobs:
        yield record.spec.code
        if record.spec.venv:
            yield VENV_OBJECT + record.spec.venv
