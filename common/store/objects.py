"""The seam of the object store: files that are too large for a message, by name.

NATS (`NatsObjects`, readable by `nats object ls`) and in memory (`MemoryObjects`); one conformance
suite. A name is stored once and never changed: whoever puts it again changes nothing. Objects go
from file to file in pieces: none is in memory as a whole.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from io import BufferedIOBase
from typing import IO, Final, Protocol, cast

import nats.errors
import nats.js.errors
from nats.js.object_store import ObjectStore

from slackwater.common.base.clock import Clock
from slackwater.common.base.errors import DeadlineExceeded, Rejected, Unavailable
from slackwater.common.bus.nats import NatsBus

CODE: Final = "code"
"""The bucket of packs: of code by their digests, of virtual environments by `venv-<digest>`."""
OBJECT_S: Final = 600.0
"""Seconds for one object, either way."""
_NAMES_S: Final = 120.0
"""Seconds to list or delete."""


class Objects(Protocol):
    """Raises Unavailable, DeadlineExceeded, Rejected."""

    async def put(self, name: str, source: IO[bytes]) -> None:
        """Store what is read from the open file. Durable when it returns."""
        ...

    async def get(self, name: str, target: IO[bytes]) -> bool:
        """Write the object to the open file; False: there is none of that name."""
        ...

    async def names(self) -> dict[str, float]:
        """Name -> when it was put, in seconds since 1970, of all objects."""
        ...

    async def delete(self, name: str) -> None:
        """Forget it, if it is there."""
        ...


class NatsObjects:
    """A bucket of JetStream's object store, on `replicas` of a cluster's servers."""

    def __init__(self, bus: NatsBus, bucket: str, *, replicas: int = 1) -> None:
        self._bus, self._bucket, self._replicas = bus, bucket, replicas

    async def put(self, name: str, source: IO[bytes]) -> None:
        async with self._store(OBJECT_S) as store:
            if not await _known(store, name):
                await store.put(name, cast(BufferedIOBase, source))

    async def get(self, name: str, target: IO[bytes]) -> bool:
        async with self._store(OBJECT_S) as store:
            if not await _known(store, name):
                return False
            await store.get(name, cast(BufferedIOBase, target))
            return True

    async def names(self) -> dict[str, float]:
        async with self._store(_NAMES_S) as store:
            try:
                found = await store.list()
            except nats.js.errors.NotFoundError:  # It says so of an empty one.
                return {}
            return {info.name: _seconds(info.mtime) for info in found if not info.deleted}

    async def delete(self, name: str) -> None:
        async with self._store(_NAMES_S) as store:
            if await _known(store, name):
                await store.delete(name)

    @asynccontextmanager
    async def _store(self, within_s: float) -> AsyncIterator[ObjectStore]:
        """Open the bucket, and say errors in our words."""
        stream = self._bus.client.jetstream()
        where = f"object store {self._bucket}"
        try:
            async with asyncio.timeout(within_s):
                try:
                    store = await stream.object_store(self._bucket)
                except nats.js.errors.BucketNotFoundError:
                    store = await stream.create_object_store(self._bucket, replicas=self._replicas)
                yield store
        except TimeoutError as error:
            raise DeadlineExceeded(f"{where}: no answer within {within_s:g} s") from error
        except (nats.js.errors.ServerError, nats.js.errors.ServiceUnavailableError) as error:
            raise Unavailable(f"{where}: {error}") from error
        except nats.js.errors.Error as error:
            raise Rejected(f"{where}: {error}") from error
        except nats.errors.Error as error:
            raise Unavailable(f"{where}: {error}") from error


async def _known(store: ObjectStore, name: str) -> bool:
    try:
        await store.get_info(name)
    except nats.js.errors.ObjectNotFoundError:
        return False
    except nats.js.errors.ObjectDeletedError:
        return False
    return True


def _seconds(mtime: str | datetime | None) -> float:
    if mtime is None:
        return 0.0
    return (datetime.fromisoformat(mtime) if isinstance(mtime, str) else mtime).timestamp()


class MemoryObjects:
    """Objects of one simulated system."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._objects: dict[str, tuple[float, bytes]] = {}

    async def put(self, name: str, source: IO[bytes]) -> None:
        self._objects.setdefault(name, (self._clock.now_s(), source.read()))

    async def get(self, name: str, target: IO[bytes]) -> bool:
        if name not in self._objects:
            return False
        target.write(self._objects[name][1])
        return True

    async def names(self) -> dict[str, float]:
        return {name: at_s for name, (at_s, _) in self._objects.items()}

    async def delete(self, name: str) -> None:
        self._objects.pop(name, None)
