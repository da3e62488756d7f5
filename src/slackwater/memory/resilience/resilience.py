"""How a span's pages are spread over slabs: one slab with the disk behind it.

Gu, dissertation, 2.4.3: the remote copy serves reads, the local backup what is left when the remote
one goes. Coding (`8+2`) and replication (`2-copies`) keep the span readable when lenders go: they
are hydra.py with different codes. They have the disk behind them, too: it is what flush means.
"""

import re
from collections.abc import Sequence
from typing import Final

import numpy as np

from slackwater.common.base.background import Background
from slackwater.common.base.errors import ConfigRejected, Unavailable
from slackwater.memory.resilience.coding import ErasureCode
from slackwater.memory.resilience.hydra import Hydra
from slackwater.memory.resilience.replication import Copies
from slackwater.memory.store import PAGE_BYTES, Pages, RemoteMember, Resilience


class DiskBackup:
    """One member; page i of the span lies at i * PAGE_BYTES."""

    name = "disk"
    width = 1
    needed = 1
    backup = True
    erasures = 0
    lost_pages = 0

    def span_pages(self, slab_bytes: int) -> int:
        return slab_bytes // PAGE_BYTES

    async def read(
        self, span: int, members: Sequence[RemoteMember | None], pages: Pages, target: memoryview
    ) -> None:
        await _only(members).read((pages * PAGE_BYTES).tolist(), PAGE_BYTES, target)

    async def write(
        self, span: int, members: Sequence[RemoteMember | None], pages: Pages, source: memoryview
    ) -> None:
        await _only(members).write((pages * PAGE_BYTES).tolist(), PAGE_BYTES, source)

    async def settled(self, span: int, pages: Pages) -> None:
        """Its writes return when they are done."""

    async def quiet(self, span: int) -> None:
        """Its reads, too, return when they are done."""

    async def regenerate(
        self, span: int, members: Sequence[RemoteMember | None], index: int, pages: Pages
    ) -> int:
        """Redundancy is the disk's."""
        return 0

    def written(self, span: int) -> Pages:
        return np.zeros(0, np.int64)

    def forget(self, span: int) -> None:
        """It keeps nothing."""


def _only(members: Sequence[RemoteMember | None]) -> RemoteMember:
    member = members[0]
    if member is None:
        raise Unavailable("the span has no slab at present")
    return member


_CODING: Final = re.compile(r"(\d{1,2})\+(\d{1,2})")
_COPIES: Final = re.compile(r"(\d{1,2})-copies")


def resilience(name: str, background: Background) -> Resilience:
    """`disk`, `8+2` (k data and r parity fragments) or `2-copies`. Raises ConfigRejected."""
    if name == DiskBackup.name:
        return DiskBackup()
    if coding := _CODING.fullmatch(name):
        return Hydra(name, ErasureCode(int(coding[1]), int(coding[2])), background)
    if copies := _COPIES.fullmatch(name):
        return Hydra(name, Copies(int(copies[1])), background)
    raise ConfigRejected(
        f"resilience {name!r}: choose disk, k+r (8+2 is usual) or n-copies (2-copies)"
    )
