"""Events from outside that broke a core: what they were, and that they do not do it again.

A step that raises has changed an unknown part of the core's state, and what it wanted to store may
be what no later life can read. So the process ends without storing anything of the step, and is
started anew from its records (ADR 14). Before that, the event is kept under the instance's name in
the shared bucket `breaches`, for people who mend it, and for the next life, which refuses it at
once: an honest sender repeats what was not answered. Facts differ from beat to beat, so after a few
of one kind and origin all of those are left out.

What is kept counts for BREACH_TERM_S and for the release that it broke: a mended one, or another
state of things, may well take it.
"""

import hashlib
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import msgspec
import structlog

from slackwater.common.base import codec, limits
from slackwater.common.base.clock import Clock
from slackwater.common.base.effects import Requested
from slackwater.common.base.errors import DecodeRejected, Retryable
from slackwater.common.store.base import SequenceConflict, Store
from slackwater.schemas.base import Message
from slackwater.schemas.service import Breach, BreachesRecord

BUCKET = "breaches"
_encode = msgspec.msgpack.Encoder().encode
_log = structlog.get_logger()


def from_outside(event: Any) -> bool:
    """Say whether the event carries a message that another process sent."""
    return isinstance(getattr(event, "message", None), Message)


def _origin(event: Any) -> str:
    """Return the part that repeated facts have in common; empty for a request, which is repeated as
    it was."""
    if isinstance(event, Requested):
        return ""
    where = _sent_under(event) or type(event).__name__
    return f"{where} {type(event.message).__name__}"


def _sent_under(event: Any) -> str:
    """The subject of a fact, or the key of the request that was answered; empty for others."""
    if subject := getattr(event, "subject", ""):
        return str(subject)
    key = getattr(event, "key", None)
    return "" if key is None else repr(key)


def _content(event: Any) -> bytes:
    """Return the message without its sender, which differs after a restart."""
    return _encode(msgspec.structs.replace(event.message, sender="", epoch=0))


def _digest(event: Any) -> str:
    where = _sent_under(event).encode()
    return hashlib.blake2b(where + b"\n" + _content(event), digest_size=16).hexdigest()


class Breaches:
    """Breaches of the instance `name` (`service.id`). `epoch` is that of the next record."""

    def __init__(self, name: str, clock: Clock, epoch: Callable[[], int]) -> None:
        self._name = name
        self._key = name.replace(".", "_")
        self._clock = clock
        self._epoch = epoch
        self._version = version("slackwater")
        self.kept: tuple[Breach, ...] = ()
        """Invariants that this instance broke, the newest last."""

    @property
    def where(self) -> str:
        return f"bucket {BUCKET}, key {self._key}"

    async def load(self, store: Store) -> None:
        """Read the breaches that former lives kept. They are an aid: a service starts without them,
        too."""
        try:
            found = await (await store.bucket(BUCKET)).get(self._key)
            if found is not None and found.value is not None:
                record, _ = codec.decode_record(found.value, BreachesRecord, self.where)
                self.kept = record.breaches
        except (Retryable, DecodeRejected) as error:
            _log.warning("breaches.unread", where=self.where, reason=str(error))

    def refuses(self, event: Any) -> str:
        """Why the event does not reach the core; empty: it does."""
        if not self.kept or not from_outside(event):
            return ""
        now_s = self._clock.now_s()
        counting = [
            each
            for each in self.kept
            if each.version == self._version and abs(now_s - each.at_s) < limits.BREACH_TERM_S
        ]
        if not counting:
            return ""
        digest, origin = _digest(event), _origin(event)
        same = [each for each in counting if each.digest == digest]
        alike = [each for each in counting if origin and each.origin == origin]
        if not same and len(alike) < limits.BREACHES_ALIKE_MAX:
            return ""
        error = (same or alike)[-1].error
        return f"{self._name} broke on this {limits.BREACH_TERM_S:.0f} s ago or less: {error}"

    async def keep(self, store: Store, event: Any, error: Exception) -> None:
        """Add the event to what is kept; the log has it in any case."""
        breach = Breach(
            digest=_digest(event),
            origin=_origin(event)[:256],
            event=type(event).__name__,
            message=type(event.message).__name__,
            error=f"{type(error).__name__}: {error}"[: limits.BREACH_ERROR_CHARS],
            at_s=self._clock.now_s(),
            version=self._version,
            content=_content(event)[: limits.BREACH_BYTES_MAX],
        )
        _log.error(
            "event.broke-the-core",
            event_type=breach.event,
            message=breach.message,
            digest=breach.digest,
            kept_in=self.where,
            reason=breach.error,
            exc_info=error,
        )
        others = tuple(each for each in self.kept if each.digest != breach.digest)
        self.kept = (*others, breach)[-limits.BREACHES_KEPT :]
        value = codec.encode_record(BreachesRecord(breaches=self.kept), self._epoch())
        for _ in range(limits.EPOCH_ATTEMPTS_MAX):
            try:
                bucket = await store.bucket(BUCKET)
                await bucket.put(self._key, value, expected_last=await bucket.last_sequence())
                return
            except SequenceConflict:
                continue  # Another instance keeps one of its own.
            except Retryable as unavailable:
                _log.warning("breach.not-kept", where=self.where, reason=str(unavailable))
                return
