"""Facts kept in memory, by the broker of a simulated system or a test."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Callable, Sequence

from slackwater.common.base import limits
from slackwater.common.base.errors import Unavailable
from slackwater.common.bus.memory import MemoryBroker, matches
from slackwater.common.store.history import SUBJECTS, Keeping, Kept, NothingKept


class MemoryHistory:
    """Keeps one broker's facts: all of its clients share it, and it outlives them."""

    def __init__(self, broker: MemoryBroker) -> None:
        self._broker = broker
        self._keeping: Keeping | None = None
        self._facts: OrderedDict[int, Kept] = OrderedDict()
        """Facts by sequence, ascending."""
        self._of_subject: dict[str, deque[int]] = {}
        self._last = 0
        self._nbytes = 0
        self._wakes: list[Callable[[], None]] = []

    async def keep(self, keeping: Keeping) -> bool:
        await asyncio.sleep(0)
        self._check()
        before, self._keeping = self._keeping, keeping
        if before is None:
            self._broker.captures.append((tuple(SUBJECTS.split(".")), self._take))
        elif before != keeping:
            self._bound()
        return before != keeping

    async def read(
        self,
        patterns: Sequence[str] = (),
        *,
        since_s: float = 0.0,
        after: int = 0,
        follow: bool = False,
    ) -> AsyncGenerator[Kept, None]:
        await asyncio.sleep(0)
        self._check()
        if self._keeping is None:
            raise NothingKept
        wanted = [tuple(pattern.split(".")) for pattern in patterns]
        came = asyncio.Event()
        self._wakes.append(came.set)
        place = after
        try:
            while True:
                came.clear()
                self._bound()
                for fact in [one for one in self._facts.values() if one.sequence > place]:
                    place = fact.sequence
                    tokens = fact.subject.split(".")
                    fits = not wanted or any(matches(pattern, tokens) for pattern in wanted)
                    if fits and (after or fact.at_s >= since_s):
                        yield fact
                if not follow:
                    return
                if not came.is_set():
                    await came.wait()
        finally:
            self._wakes.remove(came.set)

    def _take(self, subject: str, payload: bytes) -> None:
        self._last += 1
        self._facts[self._last] = Kept(subject, payload, self._last, self._broker.clock.now_s())
        self._of_subject.setdefault(subject, deque()).append(self._last)
        self._nbytes += len(subject) + len(payload)
        self._bound(subject)
        for wake in list(self._wakes):
            wake()

    def _bound(self, subject: str = "") -> None:
        """Remove the oldest facts, of one subject or all."""
        keeping = self._keeping
        assert keeping is not None
        for name in [subject] if subject else list(self._of_subject):
            while len(self._of_subject.get(name, ())) > keeping.per_subject:
                self._forget(self._of_subject[name][0])
        from_s = self._broker.clock.now_s() - keeping.seconds
        while self._facts:
            oldest = next(iter(self._facts.values()))
            if self._nbytes <= keeping.nbytes and oldest.at_s >= from_s:
                return
            self._forget(oldest.sequence)

    def _forget(self, sequence: int) -> None:
        fact = self._facts.pop(sequence)
        self._nbytes -= len(fact.subject) + len(fact.payload)
        of_subject = self._of_subject[fact.subject]
        of_subject.popleft()  # The oldest of all is the oldest of its subject.
        if not of_subject:
            del self._of_subject[fact.subject]

    def _check(self) -> None:
        if not self._broker.running:
            raise Unavailable(
                "facts: the server is down; nothing was sent", limits.RECONNECT_WAIT_S
            )
