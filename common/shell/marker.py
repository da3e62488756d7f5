"""Marks the writes of one bucket (common/store/witness.py), and has the marks noted.

A group of writes is noted in the writer's own file once the store has them, and told to peers,
before any of them is acknowledged. Where the file cannot be written the bucket goes on without:
its records are no less durable, and `doubt` says so.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence

import structlog

from slackwater.common.base.failpoints import failpoint
from slackwater.common.store.witness import Content, Mark
from slackwater.common.store.witness_file import Noted, Witness

Tell = Callable[[str, Mark], Awaitable[None]]
"""Tells peers a bucket's newest mark."""
_log = structlog.get_logger()


class Marker:
    """Knows what `bucket` holds once all is stored that was issued."""

    def __init__(
        self,
        bucket: str,
        records: Mapping[str, bytes],
        epoch: int,
        witness: Witness | None,
        tell: Tell,
        service: str = "",
    ) -> None:
        """`service` names its failpoints."""
        self._before, self._after = f"{service}.witness.before", f"{service}.witness.after"
        self.values = dict(records)
        """Key -> record, as it is to be in the bucket."""
        self._bucket, self._epoch = bucket, epoch
        self._content = Content(records)
        self._witness, self._tell = witness, tell
        self.doubt = ""
        """Why the file could not be written; empty: it was."""

    async def begin(self, fence: int) -> None:
        """Note the bucket as it was taken over, with its epoch record as the last write."""
        mark = self._content.mark(self._epoch, fence)
        if self._witness is not None:
            await self._noted(self._witness.begin(self._content.hexed(), mark))
        await self._tell(self._bucket, mark)

    def mark(self, key: str, value: bytes | None, sequence: int) -> tuple[Noted, Mark]:
        """Take in a write that is about to be issued with this sequence."""
        if value is None:
            self.values.pop(key, None)
        else:
            self.values[key] = value
        return Noted(key, self._content.write(key, value)), self._content.mark(
            self._epoch, sequence
        )

    async def note(self, writes: Sequence[tuple[Noted, Mark]]) -> None:
        """Note writes that the store has, in their order."""
        mark = writes[-1][1]
        if self._witness is not None:
            await self._noted(self._add(self._witness, [noted for noted, _ in writes], mark))
        await self._tell(self._bucket, mark)

    async def _add(self, witness: Witness, writes: Sequence[Noted], mark: Mark) -> None:
        failpoint(self._before)
        await witness.add(writes, mark)
        failpoint(self._after)

    async def _noted(self, work: Awaitable[None]) -> None:
        try:
            await work
        except OSError as error:
            if not self.doubt:
                _log.error("witness.not-written", bucket=self._bucket, reason=str(error))
            self.doubt = f"bucket {self._bucket}: its witness is not written: {error}"
        else:
            self.doubt = ""
