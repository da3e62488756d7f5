"""Hydra (FAST'22): each page as k + r fragments, on as many lenders. Implements store.Resilience.

The ledger knows the generation of every page's newest write, so a fragment counts only if it is of
just that write: neither a member that was away for a while nor a write that arrives late can give
back old bytes. Damage and loss are the same to a read: an erasure, of which r do not matter; with
more, PagesLost is raised, and nothing is returned. Callers do not begin to read a page while they
write it (the device holds it meanwhile); writes of one page go one after the other.
"""

import asyncio
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from slackwater.common.base.background import Background, Tasks
from slackwater.common.base.errors import AccessRefused, Unavailable
from slackwater.memory.resilience import fragments, gather, scatter
from slackwater.memory.resilience.coding import Bytes, Code
from slackwater.memory.resilience.fragments import Generations
from slackwater.memory.resilience.gather import Members, Near
from slackwater.memory.resilience.late_binding import ReadPlan, WritePlan
from slackwater.memory.resilience.scatter import Target
from slackwater.memory.store import Pages, PagesLost, RemoteMember

T = TypeVar("T")
DELTA: Final = 1
"""Members asked beyond k (FAST'22, section 4.1.2)."""
_ROUNDS_MAX: Final = 8
"""Attempts to rebuild pages that are written again each time."""


@dataclass(slots=True, eq=False)
class _Write:
    """One that not every member has answered yet."""

    pages: Pages
    generation: int
    plan: WritePlan
    decided: asyncio.Future[None]
    settled: asyncio.Future[None]


class Hydra:
    """`backup`: the local file is written as well, without anybody waiting for it."""

    backup = True

    def __init__(
        self,
        name: str,
        code: Code,
        background: Background,
        *,
        extra: int = DELTA,
    ) -> None:
        self.name = name
        self.code = code
        self.width = code.width
        self.needed = code.needed
        self.slot_bytes = fragments.slot_bytes(code)
        self.erasures = 0
        """Fragments that had to be made up for: damaged, or of another write."""
        self.refusals = 0
        """Requests that a member did not answer."""
        self.lost_pages = 0
        """That could not be made whole."""
        self.background = background
        self._extra = extra
        self._pages = 0
        self._generation = 0
        self._ledger: dict[int, Generations] = {}
        """Span -> by page: the newest write; negative: it does not count yet; 0: none does."""
        self._near: dict[int, Near] = {}
        self._targets: dict[int, Target] = {}
        self._writes: dict[int, dict[int, _Write]] = {}
        """Span -> by generation. They settle in any order: a channel has several streams, and
        acknowledgements keep their order on each alone. No page is in two of them."""
        self._tasks: dict[int, Tasks] = {}
        """By span."""

    def span_pages(self, slab_bytes: int) -> int:
        self._pages = slab_bytes // self.slot_bytes
        return self._pages

    def ledger(self, span: int) -> Generations:
        assert self._pages, "span_pages was not asked"
        if span not in self._ledger:
            self._ledger[span] = np.zeros(self._pages, np.int64)
        return self._ledger[span]

    def forget(self, span: int) -> None:
        self._ledger.pop(span, None)
        self._near.pop(span, None)
        self._targets.pop(span, None)

    # Reads ----------------------------------------------------------------------------------------

    async def read(self, span: int, members: Members, pages: Pages, target: memoryview) -> None:
        expected = self.ledger(span)[pages]
        if self._at_hand(span, members, pages, expected, target):
            return
        plan, slots = await self._gather(span, members, pages, expected, self._extra)
        whole = plan.enough
        if not whole.all():
            # A page that is read ahead may be written meanwhile: its fragments are of two writes.
            still = (expected >= 0) & (self.ledger(span)[pages] == expected)
            lost = ~whole & still
            self.lost_pages += int(lost.sum())
            raise PagesLost(
                f"{int(lost.sum())} pages of span {span}: fewer than {self.needed} of "
                f"{self.width} fragments are left and right",
                pages[lost],
            )
        into = np.frombuffer(target, np.uint8).reshape(len(pages), -1)
        for chosen, which in plan.groups():
            into[which] = self.code.decode(chosen, _fragments(slots, chosen, which))

    def _at_hand(
        self, span: int, members: Members, pages: Pages, expected: Generations, target: memoryview
    ) -> bool:
        """Read out of members that are mapped and have everything, if there are so many."""
        found = self._near.get(span)
        if found is None or found.members is not members:
            found = gather.near(self.code, members)
        for _ in range(self.width - self.needed + 1):
            if found is None:
                return False
            self._near[span] = found
            failed = gather.read(self.code, found, span, pages, expected, target)
            if failed < 0:
                return failed == gather.GOOD
            self.erasures += 1
            found = gather.without(self.code, found, failed)
        return False

    async def _gather(
        self, span: int, members: Members, pages: Pages, expected: Generations, extra: int
    ) -> tuple[ReadPlan, dict[int, Bytes]]:
        """Ask until every page has `needed` right fragments, or nobody is left to ask."""
        able = [index for index, member in enumerate(members) if member is not None]
        plan = ReadPlan(able, len(pages), self.needed, self.width, extra)
        found: dict[int, Bytes] = {}
        written = expected > 0
        asks = deque(plan.begin())
        flying: dict[asyncio.Task[Bytes | None], int] = {}

        def judge(index: int, slots: Bytes | None) -> None:
            if slots is None:
                asks.extend(plan.failed(index))
                return
            good = fragments.generations_of(self.code, index, span, pages, slots) == expected
            good &= written
            self.erasures += len(pages) - int(np.count_nonzero(good))
            found[index] = slots
            asks.extend(plan.answered(index, good))

        while True:
            while asks and not plan.done:
                index = asks.popleft()
                member = members[index]
                assert member is not None
                if member.mapped is not None:
                    judge(index, self._copy(member, pages))
                else:
                    flying[self._begin(span, self._fetch(member, pages))] = index
            if plan.done or not flying:
                return plan, found
            ended, _ = await asyncio.wait(flying, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                judge(flying.pop(task), task.result())

    def _copy(self, member: RemoteMember, pages: Pages) -> Bytes | None:
        """Out of mapped memory; None: it was taken away."""
        slots: Bytes = self._slots(member)[pages]
        if member.intact():
            return slots
        self.refusals += 1
        return None

    async def _fetch(self, member: RemoteMember, pages: Pages) -> Bytes | None:
        """Its slots of these pages; None: it does not answer. The buffer is this request's own:
        nobody waits for the slow ones."""
        slots = np.empty((len(pages), self.slot_bytes), np.uint8)
        offsets = (pages * self.slot_bytes).tolist()
        try:
            await member.read(offsets, self.slot_bytes, slots.reshape(-1).data)
        except (Unavailable, AccessRefused):
            self.refusals += 1
            return None
        return slots

    def _slots(self, member: RemoteMember) -> Bytes:
        assert member.mapped is not None
        table = np.frombuffer(member.mapped, np.uint8, count=self._pages * self.slot_bytes)
        return table.reshape(self._pages, self.slot_bytes)

    # Writes ---------------------------------------------------------------------------------------

    async def write(self, span: int, members: Members, pages: Pages, source: memoryview) -> None:
        """Returns with the k-th acknowledgement. `source` is not read after the first suspension
        that follows the encoding."""
        await self.settled(span, pages)
        able = [index for index, member in enumerate(members) if member is not None]
        if len(able) < self.needed:
            raise PagesLost(f"span {span}: {len(able)} of {self.needed} members", pages)
        self._generation += 1
        self.ledger(span)[pages] = -self._generation
        slots = scatter.write(
            self.code, self._target(span, members), span, pages, self._generation, source
        )
        loop = asyncio.get_running_loop()
        write = _Write(
            pages, self._generation, WritePlan(able, self.needed),
            loop.create_future(), loop.create_future(),
        )  # fmt: skip
        self._writes.setdefault(span, {})[write.generation] = write
        for index in able:
            member = members[index]
            assert member is not None
            if member.mapped is not None:
                self._arrived(span, write, index, member.intact())
            else:
                self._begin(span, self._post(span, write, index, member, slots[index]))
        await asyncio.shield(write.decided)
        if not write.plan.acknowledged:
            raise PagesLost(f"span {span}: fewer than {self.needed} members took the pages", pages)

    def _target(self, span: int, members: Members) -> Target:
        found = self._targets.get(span)
        if found is None or not scatter.holds(found, members):
            found = self._targets[span] = scatter.target(self.code, members)
        return found

    async def _post(
        self, span: int, write: _Write, index: int, member: RemoteMember, slots: Bytes
    ) -> None:
        offsets = (write.pages * self.slot_bytes).tolist()
        try:
            await member.write(offsets, self.slot_bytes, slots.reshape(-1).data)
        except (Unavailable, AccessRefused):
            self._arrived(span, write, index, False)
        except BaseException:
            self._arrived(span, write, index, False)
            raise
        else:
            self._arrived(span, write, index, True)

    def _arrived(self, span: int, write: _Write, index: int, arrived: bool) -> None:
        self.refusals += not arrived
        write.plan.answered(index, arrived)
        decided = write.plan.acknowledged or write.plan.lost
        if decided and not write.decided.done():
            ledger = self.ledger(span)
            ours = write.pages[ledger[write.pages] == -write.generation]
            ledger[ours] = write.generation if write.plan.acknowledged else 0
            write.decided.set_result(None)
        if write.plan.settled:
            del self._writes[span][write.generation]
            if not self._writes[span]:
                del self._writes[span]
            write.settled.set_result(None)

    async def settled(self, span: int, pages: Pages) -> None:
        while True:
            flying = self._writes.get(span, {}).values()
            mine = [write for write in flying if np.isin(write.pages, pages).any()]
            if not mine:
                return
            await asyncio.wait([w.settled for w in mine])

    async def quiet(self, span: int) -> None:
        if span in self._tasks:
            await self._tasks[span].begun_ended()

    def _begin(self, span: int, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        if span not in self._tasks:
            self._tasks[span] = self.background.group()
        return self._tasks[span].spawn(work)

    # Regeneration ---------------------------------------------------------------------------------

    def written(self, span: int) -> Pages:
        """Pages of the span that should be in its members."""
        return np.flatnonzero(self.ledger(span) != 0)

    async def regenerate(self, span: int, members: Members, index: int, pages: Pages) -> int:
        """Give member `index` what it lacks of these pages; how many fragments it was given. A page
        that is written meanwhile is done again, as the two writes may arrive in either order.
        Raises Unavailable, AccessRefused: the member itself fails."""
        target = members[index]
        assert target is not None
        others = [None if i == index else member for i, member in enumerate(members)]
        given = 0
        for _ in range(_ROUNDS_MAX):
            await self.settled(span, pages)
            pages = pages[self.ledger(span)[pages] > 0]
            pages = pages[~await self._has(span, index, target, pages)]
            expected = self.ledger(span)[pages]
            pages, expected = pages[expected > 0], expected[expected > 0]
            if not len(pages):
                return given
            made, done = await self._rebuilt(span, others, index, pages, expected)
            pages, expected = pages[done], expected[done]
            if not len(pages):
                return given
            slots = fragments.pack(self.code, index, span, pages, expected, made)
            await self._give(target, pages, slots)
            given += len(pages)
            pages = pages[self.ledger(span)[pages] != expected]
        return given

    async def _has(
        self, span: int, index: int, target: RemoteMember, pages: Pages
    ) -> NDArray[np.bool_]:
        """By page: the member's fragment is the newest write's."""
        if not len(pages):
            return np.zeros(0, np.bool_)
        copied = self._copy(target, pages) if target.mapped is not None else None
        slots = copied if copied is not None else await self._fetch(target, pages)
        if slots is None:
            raise Unavailable(f"member {index} of span {span} does not answer")
        found = fragments.generations_of(self.code, index, span, pages, slots)
        newest: NDArray[np.bool_] = found == self.ledger(span)[pages]
        return newest

    async def _rebuilt(
        self, span: int, others: Members, index: int, pages: Pages, expected: Generations
    ) -> tuple[Bytes, Pages]:
        """(fragments `index`, of which of the pages): of those that can still be made whole."""
        plan, slots = await self._gather(span, others, pages, expected, 0)
        done = np.flatnonzero(plan.enough)
        made = np.empty((len(pages), self.code.fragment_bytes), np.uint8)
        for chosen, which in plan.groups():
            if len(chosen) == self.needed:
                made[which] = self.code.rebuild(index, chosen, _fragments(slots, chosen, which))
        return made[done], done

    async def _give(self, target: RemoteMember, pages: Pages, slots: Bytes) -> None:
        if target.mapped is None:
            await target.write(
                (pages * self.slot_bytes).tolist(), self.slot_bytes, slots.reshape(-1).data
            )
            return
        self._slots(target)[pages] = slots
        if not target.intact():
            raise AccessRefused(f"the slab of {target.lender} was taken away")


def _fragments(slots: dict[int, Bytes], chosen: Sequence[int], which: Pages) -> Bytes:
    return np.stack([slots[index][which, fragments.HEADER_BYTES :] for index in chosen])
