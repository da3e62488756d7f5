"""`slackwater submit --workdir`: the code folder, packed and stored for the nodes that lack it."""

from pathlib import Path
from typing import Final

from slackwater.common.base.errors import Rejected
from slackwater.common.shell.client import Client
from slackwater.common.store.code_packs import Pack, pack
from slackwater.console.outcome import Usage

UNUSED_S: Final = 3600.0
"""Seconds after which a pack that no job names is removed: it was stored for a job that was to be
submitted next."""
PACKS_MAX: Final = 256
"""Packs that are stored at once, of jobs that the master knows."""


def packed(folder: Path) -> Pack:
    """Pack the code folder. Raises Usage."""
    try:
        return pack(folder)
    except (Rejected, OSError) as error:
        raise Usage(f"--workdir: {error}") from error


def within(folder: Path | None) -> str:
    """Return the folder of the code that the program runs in. Raises Usage."""
    if folder is None:
        return ""
    if folder.is_absolute() or ".." in folder.parts:
        raise Usage(f"--folder {folder} beside --workdir: give a folder within the code")
    return "" if str(folder) == "." else str(folder)


async def store(client: Client, code: Pack) -> None:
    """Store the pack, unless it is, after packs that no job names any more were removed. Raises
    Rejected where too many jobs' packs are kept."""
    objects, now_s = client.objects, client.clock.now_s()
    known = await objects.names()
    named = await _named(client) if known else set()
    for name in [name for name in known if name not in named and name != code.digest]:
        if now_s - known[name] > UNUSED_S:
            await objects.delete(name)
            del known[name]
    if code.digest not in known and len(known) >= PACKS_MAX:
        raise Rejected(
            f"{len(known)} packs of code are stored for jobs, at most {PACKS_MAX}: delete "
            "ended jobs (`slackwater delete`), or submit without --workdir"
        )
    await objects.put(code.digest, code.payload)


async def _named(client: Client) -> set[str]:
    """Collect the digests that jobs name, ended ones included."""
    found: set[str] = set()
    offset = 0
    while True:
        page = await client.job_page(offset=offset)
        found |= {record.spec.code for record in page.jobs}
        offset += len(page.jobs)
        if not page.jobs or offset >= page.total:
            return found
