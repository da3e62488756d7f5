"""The seam of remote memory: an address space of pages that somebody keeps.

`PageStore` is what the NBD server, a RemoteArray's pager and the spill tier read and write. It
takes batches of pages: one call names many, because a request costs more than a page. `Device` is
the real one; `Resilience` is the strategy by which it spreads a span over remote slabs.
"""

from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from slackwater.common.base.errors import Unavailable
from slackwater.schemas.memory import LenderId

PAGE_BYTES: Final = 4096
Pages = NDArray[np.int64]
"""Page numbers of a device's address space; a batch of them."""


class PagesLost(Unavailable):
    """These pages of a span cannot be had from its members, or were not taken by them; the span's
    other pages can."""

    def __init__(self, reason: str, pages: Pages) -> None:
        super().__init__(reason)
        self.pages = pages


class PageStore(Protocol):
    """Raises Unavailable (neither remote memory nor backup can serve it now; nothing was returned
    that is not right), Rejected (outside the address space), OSError (the backup file's own: the
    errno is what an NBD client is told).

    A batch may name a page twice only in `read_pages`. Writes of one page by calls that overlap in
    time end in either order; a read that begins after a write has returned sees it, whatever
    happens to lenders in between.
    """

    @property
    def page_count(self) -> int: ...

    def read_now(self, pages: Pages, target: memoryview) -> int:
        """Fill as many pages from the front as can be had without waiting (mapped memory, writes
        that are held); how many were. Safe from any thread."""
        ...

    async def read_pages(self, pages: Pages, target: memoryview) -> None:
        """The i-th page of the batch comes to `target[i * PAGE_BYTES:]`."""
        ...

    async def write_pages(self, pages: Pages, source: memoryview) -> None:
        """Returns when a later read sees it: remote memory has it, or else the backup. `source` is
        copied before the first suspension: the caller may reuse it at once."""
        ...

    async def discard(self, first: int, count: int) -> None:
        """These pages read as zeros from now on, and take no memory (TRIM, write zeroes)."""
        ...

    async def flush(self) -> None:
        """Every write that has returned survives a kill of this process when this returns."""
        ...


class RemoteMember(Protocol):
    """One slab that backs a span, open for one-sided access (lenders.py makes it)."""

    @property
    def lender(self) -> LenderId: ...

    @property
    def nbytes(self) -> int:
        """Bytes of data; the trailer lies behind."""
        ...

    @property
    def mapped(self) -> memoryview | None:
        """Data and trailer, where the transport maps them (shm); then check the fence after each
        use, with `intact`."""
        ...

    def intact(self) -> bool:
        """The fence word is what it was when the slab was mapped. Always true where `mapped` is
        None: there the lender ends the channel before it takes the memory away."""
        ...

    async def read(self, offsets: Sequence[int], length: int, target: memoryview) -> None:
        """`length` bytes from each offset, one behind the other into `target`: one request.
        Raises Unavailable, AccessRefused."""
        ...

    async def write(self, offsets: Sequence[int], length: int, source: memoryview) -> None: ...


class Resilience(Protocol):
    """How a span's pages are spread over its members: `members[i]` is None where that slab is lost
    or not mapped yet. A list of members is never changed: others come as another list."""

    @property
    def name(self) -> str: ...

    @property
    def width(self) -> int:
        """Members of a span, each on a lender of its own."""
        ...

    @property
    def needed(self) -> int:
        """Members without which a span cannot be read: fewer, and it is unmapped."""
        ...

    @property
    def erasures(self) -> int:
        """Fragments that reads had to make up for: damaged, or of another write."""
        ...

    @property
    def lost_pages(self) -> int:
        """That could not be made whole."""
        ...

    @property
    def backup(self) -> bool:
        """Whether writes go to the local backup file as well. Without it, flush waits until every
        member has the bytes and the slab map is durable."""
        ...

    def span_pages(self, slab_bytes: int) -> int:
        """Pages of one span."""
        ...

    async def read(
        self, span: int, members: Sequence[RemoteMember | None], pages: Pages, target: memoryview
    ) -> None:
        """`pages` count from the span's start. Raises PagesLost when what enough members answer
        cannot be made whole: damage is detected, never returned. It names none where pages were
        written meanwhile. Unavailable, AccessRefused: the span's only member fails."""
        ...

    async def write(
        self, span: int, members: Sequence[RemoteMember | None], pages: Pages, source: memoryview
    ) -> None:
        """Returns when `needed` members have the pages. The caller holds them (reads do not come
        here) until `settled`. Raises as `read`."""
        ...

    async def settled(self, span: int, pages: Pages) -> None:
        """Every member has answered to the writes of these pages."""
        ...

    async def quiet(self, span: int) -> None:
        """Wait until all that was begun on the span before is over, also what nobody waits for any
        more."""
        ...

    async def regenerate(
        self, span: int, members: Sequence[RemoteMember | None], index: int, pages: Pages
    ) -> int:
        """Give member `index` what it lacks of these pages; how many pages that were."""
        ...

    def written(self, span: int) -> Pages:
        """Pages of the span that a new member may lack."""
        ...

    def forget(self, span: int) -> None:
        """The span is unmapped: nothing in its members counts any more."""
        ...
