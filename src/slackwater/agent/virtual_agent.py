"""An Agent whose process computes several virtual ranks, one after another.

A job of V virtual ranks has V gradients in each iteration, folded in virtual order. How many
processes compute them changes nothing about the bits; which of them this one computes is known
before it begins (common/domains/slots/virtual.py). Each tensor is pushed once for each of them, in
their order: the k-th push of a tensor goes into the slot of the k-th virtual rank.

A process that was started again begins with the oldest iteration that some bucket lacks, and with
the parameters of the version before, which every bucket still has: the next update but one writes
over them, and needs what this process has yet to push. So it pushes the same bits again.
"""

import asyncio
import time
from collections.abc import Iterator
from typing import Any, Final

from slackwater.agent.attachment import Array
from slackwater.agent.client import Agent
from slackwater.agent.local import Local
from slackwater.agent.region_access import Staged
from slackwater.agent.session import Session
from slackwater.common.base.errors import DeadlineExceeded, Rejected
from slackwater.common.domains.slots.sizes import Sizes
from slackwater.common.domains.slots.virtual import assigned

_LOOK_S: Final = 0.01


class VirtualAgent(Agent):
    """An Agent of a job of `virtual_ranks`; `options` are Agent's."""

    def __init__(self, *, virtual_ranks: int, **options: Any) -> None:
        """Raises Rejected, as Agent does, and where there are more workers than virtual ranks."""
        if options.get("device"):
            raise Rejected("virtual ranks have their gradients in host memory: give no device")
        self._virtual_ranks = virtual_ranks
        super().__init__(**options)

    @property
    def virtual_ranks(self) -> int:
        return self._virtual_ranks

    @property
    def gradients(self) -> int:
        """How many gradients all iterations were made of that the program has waited for."""
        return self._iteration * self._virtual_ranks

    @property
    def workers(self) -> int:
        """How many processes compute the next iteration."""
        return self.crew(self._iteration + 1)

    @property
    def attempt(self) -> int:
        """The attempt of the job; 0 where its user started it."""
        return self._session.attempt if isinstance(self._session, Session) else 0

    @property
    def restarted(self) -> bool:
        """Say whether this rank was started again, or may have been, by its user."""
        session = self._session
        return isinstance(session, Session) and bool(session.restarts or not session.attempt)

    @property
    def joined_late(self) -> bool:
        """Say whether this process joined others that trained already."""
        control = self._session._control if isinstance(self._session, Session) else None
        return control is not None and control.joining

    @property
    def places(self) -> int:
        """A number that changes with every move of a bucket to another aggregator."""
        session = self._session
        return session._core.location_epoch if isinstance(session, Session) else 0

    def _begin(self) -> None:
        base = min(bucket.version for bucket in self._session.buckets)
        for bucket in self._session.buckets:
            bucket.reads_confirmed, bucket.iteration = True, base
            slots = bucket.slots
            if bucket.version > base and isinstance(slots, Staged):
                self._on_loop(slots.fetch(base))
        super()._begin()

    def begin(self, iteration: int) -> range:
        """Begin an iteration: return the virtual ranks whose gradients this process pushes in it;
        none, where it joins with the one after, or leaves. Some tensor must have been waited for as
        of the iteration before: who counts was written before that was applied. Raises
        DeadlineExceeded where rank 0 does not say how many there are."""
        lanes = assigned(self._virtual_ranks, self.crew(iteration), self.rank)
        if any(bucket.lanes != tuple(lanes) for bucket in self._buckets):
            self.wait()  # The slots of the iteration before are not needed any more.
            for bucket in self._buckets:
                bucket.begin(lanes)
        return lanes

    def crew(self, iteration: int) -> int:
        """Return how many processes compute the iteration, the next one at most."""
        session = self._session
        if isinstance(session, Local):
            return 1
        if session.sizing is not None:
            return session.sizing.at(iteration).workers
        until_s = time.monotonic() + self._deadline_s
        while any(sizes.attempt != session.attempt for sizes in self._sizes()):
            if time.monotonic() > until_s:
                raise DeadlineExceeded(
                    f"job {self.job}, rank {self.rank}: rank 0 did not begin within "
                    f"{self._deadline_s:g} s; `slackwater job {self.job}` says where it is"
                )
            time.sleep(_LOOK_S)
            for bucket in self._buckets:
                if isinstance(bucket.slots, Staged):
                    self._on_loop(bucket.slots.read_words())
        return max(sizes.at(iteration) for sizes in self._sizes()).workers

    def _sizes(self) -> list[Sizes]:
        return [bucket.slots.sizes for bucket in self._buckets if bucket.slots is not None]

    def confirmed(self) -> Iterator[Array]:
        """Yield the parameters that the program has waited for last, in the job's order, a divided
        tensor in its parts. They stand until it waits again."""
        for name in self.tensors:
            for bucket, position in self._places_of(name):
                yield bucket.buffer(position)

    def skip(self) -> None:
        """Push nothing in this iteration: others compute all of it."""
        for bucket in self._buckets:
            bucket.iteration += 1

    def _on_loop(self, work: Any) -> None:
        """Run a coroutine in the Agent's thread. Raises Unavailable, AccessRefused."""
        session = self._session
        assert isinstance(session, Session)
        asyncio.run_coroutine_threadsafe(work, session._loop).result(self._deadline_s)
