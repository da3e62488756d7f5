"""`slackwater submit --workdir` and `--venv`: the code folder and the virtual environment, packed
and stored for the nodes that lack them."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryFile
from typing import Final, NamedTuple

from slackwater.common.base.errors import Rejected
from slackwater.common.shell.client import Client
from slackwater.common.store import code_packs, venv_packs
from slackwater.common.store.packs import Pack, mebibytes
from slackwater.console.outcome import Usage, err
from slackwater.schemas.jobs import VENV_OBJECT, JobRecord, JobSpec

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


def packed(folder: Path) -> Pack:
    """Pack the code folder. Raises Usage."""
    return _packed("--workdir", code_packs.pack, folder)


def packed_venv(folder: Path) -> Pack:
    """Pack the virtual environment, and warn of what of it the nodes will lack. Raises Usage."""
    found = _packed("--venv", venv_packs.pack, folder)
    for warning in venv_packs.Venv(folder).warnings():
        err.print(f"--venv: {warning}", markup=False)
    return found


def _packed(option: str, pack: Callable[[Path], Pack], folder: Path) -> Pack:
    try:
        return pack(folder)
    except (Rejected, OSError) as error:
        raise Usage(f"{option}: {error}") from error


def within(folder: Path | None) -> str:
    """Return the folder of the code that the program runs in. Raises Usage."""
    if folder is None:
        return ""
    if folder.is_absolute() or ".." in folder.parts:
        raise Usage(f"--folder {folder} beside --workdir: give a folder within the code")
    return "" if str(folder) == "." else str(folder)


def check_program(spec: JobSpec, venv: Path) -> None:
    """Raises Usage where the program is not one that the nodes find in the environment."""
    if not spec.program:
        raise Usage("--venv: the job runs no program; give -- COMMAND, or leave it out")
    program = Path(spec.program[0])
    if len(program.parts) > 1 and program.absolute().is_relative_to(venv.absolute()):
        raise Usage(
            f"--venv: {program} is where your machine has it; give -- {program.name}, which nodes "
            "find in their copy"
        )


async def store(client: Client, sent: Sent) -> None:
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
            await _put(client, name, pack)


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


async def _put(client: Client, name: str, pack: Pack) -> None:
    if name.startswith(VENV_OBJECT):
        said = f"{mebibytes(pack.nbytes)}, {len(pack.names):,} files"
        err.print(f"storing the virtual environment for the nodes ({said})", markup=False)
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
