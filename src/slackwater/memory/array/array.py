"""RemoteArray: a numpy array larger than memory; its pages live in other machines' idle memory.

    with RemoteArray((200_000, 4096), np.float32, cache_bytes=1 << 30, url=bus) as data:
        data.prefetch(np.s_[1000:2000])
        data[0] = 1.0

The array is shared memory registered with userfaultfd. Touching a page that is not here makes the
kernel ask the pager, a process of its own (pager_process.py), which brings it and keeps at most
`cache_bytes` here. The array is scratch: it ends with `close` or the program. What cannot work is
refused when it is made; what is lost later ends in SIGBUS with a line on stderr, never in wrong
bytes: a page that neither remote memory nor backup could give, or, when the pager is killed, all.

Not for direct I/O or registration with a NIC or GPU: a device does not fault. A child of fork does
not have it: its methods raise, and touching it ends the child with a reason (forked.py).
"""

import contextlib
import ctypes
import math
import mmap
import os
import secrets
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Self

import msgspec
import numpy as np
import structlog
from numpy.lib.array_utils import byte_bounds
from numpy.typing import DTypeLike, NDArray

from slackwater.common.base import limits
from slackwater.common.base.errors import ConfigRejected, Rejected, Unavailable
from slackwater.common.bus.access import Credentials
from slackwater.memory.array import forked, watcher
from slackwater.memory.array.pager_process import (
    Answer,
    Begin,
    Close,
    Figures,
    Flush,
    Prefetch,
    Request,
    encode,
)
from slackwater.memory.array.userfault import DO_WAKE, Userfault, open_userfault
from slackwater.memory.prefetch.prefetch import WINDOW_MAX
from slackwater.memory.store import PAGE_BYTES

_ANSWER_S: Final = 30.0
_STDERR: Final = 2
_log = structlog.get_logger()
_DEAD: Final = (
    b"slackwater: the pager of a RemoteArray died; its pages are lost, touching it ends in SIGBUS\n"
)


class _Mapping(mmap.mmap):
    """Every view of an array holds its mapping, and this the array: none outlives its pager."""

    owner: "RemoteArray"


class RemoteArray:
    """Use it like an array, or `.array`. Methods may be called from any thread."""

    def __init__(
        self,
        shape: int | Sequence[int],
        dtype: DTypeLike = np.float64,
        *,
        cache_bytes: int,
        url: str = "",
        credentials: Credentials | None = None,
        backup: Path | None = None,
        slab_bytes: int = 0,
        resilience: str = "disk",
        transport: str | None = None,
        node: str = "",
        delay_s: float = 0.0,
        window: int = WINDOW_MAX,
        patience_s: float = limits.ARRAY_STORE_S,
    ) -> None:
        """`url` of the cluster's bus, `credentials` for it (default: NATS_USER and the like of the
        environment); "": no lenders, pages go to the backup file alone, which defaults to one that
        nobody else sees. `window`: pages that are prefetched at once, at most;
        0: none. `patience_s`: so long it is tried to read a page, or to write one. Raises
        ConfigRejected, Unavailable."""
        kind = np.dtype(dtype)
        self.shape = (shape,) if isinstance(shape, int) else tuple(shape)
        self.dtype = kind
        nbytes = kind.itemsize * math.prod(self.shape)
        _check(kind, nbytes, cache_bytes)
        self._size = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        self._lock = threading.Lock()
        self._words = np.zeros(watcher.WORDS, np.int64)
        self._maker = os.getpid()
        self._kept = contextlib.ExitStack()
        self._release = weakref.finalize(self, self._kept.close)
        """Closes what is left when the array is closed, forgotten, or the program ends."""
        self._address = address = self._map_memory()
        self._start(address)
        forked.watch_forks(self)
        begin = Begin(
            address=address,
            nbytes=self._size,
            cache_bytes=cache_bytes,
            id=f"array-{os.getpid()}-{secrets.token_hex(4)}",
            backup=str(backup.absolute()) if backup else "",
            url=url,
            credentials=credentials or Credentials.from_environment(os.environ),
            slab_bytes=slab_bytes,
            resilience=resilience,
            transport=transport,
            token=os.environ.get("SLACKWATER_CLUSTER_TOKEN", ""),
            node=node,
            delay_s=delay_s,
            window=window,
            patience_s=patience_s,
        )
        try:
            self._begin(begin)
        except (Rejected, Unavailable):
            self._end()
            raise

    def _map_memory(self) -> int:
        """Shared memory whose missing pages are told to the pager; where it lies."""
        self._faults = open_userfault()
        self._kept.callback(os.close, self._faults)
        self._memory = os.memfd_create("slackwater-array", os.MFD_CLOEXEC)
        self._kept.callback(os.close, self._memory)
        os.ftruncate(self._memory, self._size)
        self._map = _Mapping(self._memory, self._size)
        self._map.owner = self
        self._map.madvise(mmap.MADV_DONTFORK)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        Userfault(self._faults, address, self._size // PAGE_BYTES).register()
        return address

    def _begin(self, begin: Begin) -> None:
        """A file of its own has lost its name when this returns: it goes with the pager."""
        with tempfile.TemporaryDirectory(prefix="slackwater-array-") as folder:
            backup = begin.backup or str(Path(folder) / "backup")
            self._ask(msgspec.structs.replace(begin, backup=backup), limits.ARRAY_START_S)

    def _start(self, address: int) -> None:
        control, theirs = socket.socketpair()
        beats, their_beats = socket.socketpair()
        self._control, self._beats = control, beats
        self._lines = control.makefile("rb")
        self._kept.enter_context(control)
        self._kept.enter_context(self._lines)
        self._kept.callback(self._words.__setitem__, watcher.ENDING, 1)  # The last in, first out.
        seconds = struct.pack("@ll", int(limits.ARRAY_SILENT_S), 0)
        beats.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, seconds)
        fds = (theirs.fileno(), their_beats.fileno(), self._faults, self._memory)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "slackwater.memory.array.pager_process", *map(str, fds)],
            pass_fds=fds,
            stdout=_STDERR,
            start_new_session=True,  # Ctrl-C is the program's to handle.
        )
        theirs.close()
        their_beats.close()
        area = np.array([address, self._size], np.uint64)
        message = np.frombuffer(_DEAD, np.uint8).copy()
        known = (self._process.pid, self._memory, self._faults, DO_WAKE, area, self._words, message)
        self._watcher = threading.Thread(
            target=_watch, args=(beats, *known), name="array-watcher", daemon=True
        )
        self._watcher.start()
        self._until_watched()

    def _until_watched(self) -> None:
        """A watcher that still had to be loaded when the program touches a page for which nobody is
        there any more would wait for the interpreter lock for ever, and so would the program."""
        deadline_s = time.monotonic() + _ANSWER_S
        while not self._words[watcher.WATCHING] and self._watcher.is_alive():
            if time.monotonic() > deadline_s:
                raise Unavailable(f"the array's watcher did not begin within {_ANSWER_S:.0f} s")
            time.sleep(0.001)

    # Use ------------------------------------------------------------------------------------------

    @property
    def array(self) -> NDArray[Any]:
        """Return a view of all of it, like any other: made anew, so that the array can be
        forgotten. Raises Rejected in a forked process."""
        self._refuse_child()
        flat = np.frombuffer(self._map, self.dtype, math.prod(self.shape))
        return flat.reshape(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: Any) -> Any:
        return self.array[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.array[key] = value

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self.array, dtype=dtype, copy=copy)

    def prefetch(self, key: Any) -> int:
        """Bring what `array[key]` covers (integers, slices), from its start, as far as half of the
        local memory; returns at once, with the pages that are on their way."""
        words = key if isinstance(key, tuple) else (key,)
        if not all(isinstance(word, int | np.integer | slice) for word in words):
            raise Rejected(f"prefetch({key!r}): give integers and slices")
        # A one-element slice in place of an integer: that would read the element.
        whole = self.array
        part = whole[
            tuple(
                word if isinstance(word, slice) else slice(int(word), int(word) + 1 or None)
                for word in words
            )
        ]
        if not part.size:
            return 0
        start = whole.ctypes.data
        low, high = byte_bounds(part)
        first = (low - start) // PAGE_BYTES
        count = (high - start - 1) // PAGE_BYTES - first + 1
        return self._ask(Prefetch(first, count)).figures["coming"]

    def flush(self) -> None:
        """Everything written so far is in remote memory and, with a backup, on its disk. Raises
        Unavailable."""
        self._ask(Flush(), limits.ARRAY_FLUSH_S + _ANSWER_S)

    def figures(self) -> dict[str, int]:
        """Counters of the pager since it began: `faults` of missing pages; `missed`, those that
        waited for the store; the prefetcher's `accesses`, `hits`, `prefetched` and `dropped`;
        `evicted`, `written_back`. And now: `resident` pages, `remote_pages` in lenders' memory."""
        return dict(self._ask(Figures()).figures)

    def close(self) -> None:
        """Gives everything back. No view of the array may be left: it would be torn away from under
        its holder. Raises Rejected if there is one, and nothing happens. In a forked process it
        does nothing."""
        if self._map.closed or os.getpid() != self._maker:
            return
        try:
            self._map.close()
        except BufferError as error:
            raise Rejected("views of this array still exist: delete them, then close") from error
        self._words[watcher.ENDING] = 1
        try:
            self._ask(Close())
        except Unavailable as error:  # It has died before: there is nothing left to give back.
            _log.warning("array.closed", reason=str(error))
        finally:
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # A forked process -----------------------------------------------------------------------------

    @property
    def area(self) -> tuple[int, int] | None:
        """Return (address, bytes); None: the array is closed."""
        return None if self._map.closed else (self._address, self._size)

    def forked(self) -> None:
        """Let go of the sockets in a forked process: the pager ends with the program that made the
        array."""
        self._beats.close()
        self._release()

    def _refuse_child(self) -> None:
        if os.getpid() != self._maker:
            raise Rejected(
                f"this process was forked from {self._maker}, whose array it is: make the array in "
                "each process, or share samples by slackwater.memory.spill.SpillServer"
            )

    # The pager ------------------------------------------------------------------------------------

    def _ask(self, request: Request, wait_s: float = _ANSWER_S) -> Answer:
        """Ask the pager. Raises Unavailable: the pager is dead, or cannot do it. Rejected in a
        forked process."""
        self._refuse_child()
        with self._lock:
            try:
                self._control.settimeout(wait_s)
                self._control.sendall(encode(request))
                line = self._lines.readline()
            except TimeoutError as error:
                raise Unavailable(f"the array's pager did not answer in {wait_s:g} s") from error
            except OSError:
                line = b""
        if not line:
            raise Unavailable(f"the array's pager died, its pages are lost: {self._last_words()}")
        answer = msgspec.json.decode(line, type=Answer)
        if answer.error:
            kind = ConfigRejected if isinstance(request, Begin) else Unavailable
            raise kind(f"array in remote memory: {answer.error}")
        return answer

    def _last_words(self) -> str:
        try:
            return f"exit status {self._process.wait(1.0)}"
        except subprocess.TimeoutExpired:
            return "it closed its socket"

    def _end(self) -> None:
        """Its process and all that is shared with it. The mapping may still be there, unusable."""
        self._words[watcher.ENDING] = 1
        self._lines.close()
        self._control.close()
        try:
            self._process.wait(_ANSWER_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._watcher.join(_ANSWER_S)
        self._release()


def _watch(beats: socket.socket, *known: Any) -> None:
    """Closes `beats` in the end. Knows nothing of the array, so that it does not keep it alive."""
    with beats:
        watcher.watch(beats.fileno(), *known)


def _check(kind: np.dtype[Any], nbytes: int, cache_bytes: int) -> None:
    if kind.hasobject:
        raise ConfigRejected(f"dtype {kind}: Python objects cannot live in remote memory")
    if not 0 < nbytes <= limits.DEVICE_BYTES_MAX:
        raise ConfigRejected(f"the array has {nbytes} bytes: 1 to {limits.DEVICE_BYTES_MAX} can be")
    if cache_bytes < limits.ARRAY_CACHE_BYTES_MIN:
        raise ConfigRejected(
            f"cache_bytes {cache_bytes}: at least {limits.ARRAY_CACHE_BYTES_MIN} are needed"
        )
