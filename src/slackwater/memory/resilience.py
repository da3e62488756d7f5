"""How a span's pages are spread over slabs: one slab with the disk behind it.

Gu, dissertation, 2.4.3: the remote copy serves reads, the local backup what is left when the remote
one goes. Other strategies (replicas, k + r coding) implement store.Resilience as well and are
registered here by name.
"""

from collections.abc import Callable, Sequence
from typing import Final

from slackwater.common.errors import ConfigRejected, Unavailable
from slackwater.memory.store import PAGE_BYTES, Pages, RemoteMember, Resilience


class DiskBackup:
    """One member; page i of the span lies at i * PAGE_BYTES."""

    name = "disk"
    width = 1
    needed = 1
    backup = True

    def span_pages(self, slab_bytes: int) -> int:
        return slab_bytes // PAGE_BYTES

    async def read(
        self, members: Sequence[RemoteMember | None], pages: Pages, target: memoryview
    ) -> None:
        await _only(members).read((pages * PAGE_BYTES).tolist(), PAGE_BYTES, target)

    async def write(
        self, members: Sequence[RemoteMember | None], pages: Pages, source: memoryview
    ) -> None:
        await _only(members).write((pages * PAGE_BYTES).tolist(), PAGE_BYTES, source)

    async def settled(self, pages: Pages) -> None:
        """Its writes return when they are done."""


def _only(members: Sequence[RemoteMember | None]) -> RemoteMember:
    member = members[0]
    if member is None:
        raise Unavailable("the span has no slab at present")
    return member


RESILIENCES: Final[dict[str, Callable[[], Resilience]]] = {"disk": DiskBackup}


def resilience(name: str) -> Resilience:
    """Raises ConfigRejected."""
    if name not in RESILIENCES:
        raise ConfigRejected(f"resilience {name!r}: choose one of {', '.join(RESILIENCES)}")
    return RESILIENCES[name]()
