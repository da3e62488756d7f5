"""Calls of the C library and of the processor that kernels make without the interpreter lock.

The symbols are looked up in the process, so compiled code can be kept on disk. Addresses are plain
integers here; whoever passes one keeps its memory alive for as long as the call runs.
"""

# numba infers the compiled functions' types itself, and its decorators mislead the type checker.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,import-untyped,untyped-decorator"

import contextlib
import mmap
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from slackwater.common.native.compiled import njit

INT: Any = types.intc
ADDRESS: Any = types.uintp
SIZE: Any = types.intp

_memcpy: Any = types.ExternalFunction("memcpy", ADDRESS(ADDRESS, ADDRESS, ADDRESS))
_memmove: Any = types.ExternalFunction("memmove", ADDRESS(ADDRESS, ADDRESS, ADDRESS))
_errno: Any = types.ExternalFunction("__errno_location", ADDRESS())
_recv: Any = types.ExternalFunction("recv", SIZE(INT, ADDRESS, ADDRESS, INT))
_send: Any = types.ExternalFunction("send", SIZE(INT, ADDRESS, ADDRESS, INT))
_pwritev: Any = types.ExternalFunction("pwritev", SIZE(INT, ADDRESS, INT, types.int64))
_write: Any = types.ExternalFunction("write", SIZE(INT, ADDRESS, ADDRESS))
_sendmsg: Any = types.ExternalFunction("sendmsg", SIZE(INT, ADDRESS, INT))
_poll: Any = types.ExternalFunction("poll", INT(ADDRESS, types.uint64, INT))
_ppoll: Any = types.ExternalFunction("ppoll", INT(ADDRESS, types.uint64, ADDRESS, ADDRESS))
_usleep: Any = types.ExternalFunction("usleep", INT(types.uint32))
_mutex_lock: Any = types.ExternalFunction("pthread_mutex_lock", INT(ADDRESS))
_mutex_unlock: Any = types.ExternalFunction("pthread_mutex_unlock", INT(ADDRESS))
_cond_wait: Any = types.ExternalFunction("pthread_cond_wait", INT(ADDRESS, ADDRESS))
_cond_clockwait: Any = types.ExternalFunction(
    "pthread_cond_clockwait", INT(ADDRESS, ADDRESS, INT, ADDRESS)
)
_clock_gettime: Any = types.ExternalFunction("clock_gettime", INT(INT, ADDRESS))
_cond_broadcast: Any = types.ExternalFunction("pthread_cond_broadcast", INT(ADDRESS))

MUTEX_BYTES: Final = 64
"""At least sizeof(pthread_mutex_t); all zeros is an unlocked one, as PTHREAD_MUTEX_INITIALIZER."""
COND_BYTES: Final = 64
_MONOTONIC: Final = 1
NO_SIGNAL: Final = 0x4000
NO_WAIT: Final = 0x40
MORE_COMES: Final = 0x8000
EINTR: Final = 4
EAGAIN: Final = 11
POLL_IN: Final = 1
POLL_OUT: Final = 4
POLL_ERROR: Final = 8
POLL_HANGUP: Final = 16


def allocate(nbytes: int) -> tuple[memoryview, int]:
    """(zeroed bytes, their address): they live as long as the view.

    Pages that nobody touches are not there, and all of them are given back with the last view. A
    C library's heap promises neither: it clears what it hands out again, and keeps what it has.
    """
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # A kernel without large pages has none to refuse.
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    array = np.frombuffer(pages, np.uint8)
    return array.data, int(array.ctypes.data)


@intrinsic
def _load_word(_context: Any, address: Any) -> Any:
    """One aligned 64-bit word, not read before anything that comes earlier in the program."""
    signature = types.int64(types.uintp)

    def codegen(_ctx: Any, builder: Any, _signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        builder.fence("seq_cst")
        return builder.load_atomic(pointer, "acquire", 8)

    return signature, codegen


@intrinsic
def _get_word(_context: Any, address: Any) -> Any:
    """Read a 64-bit word at any address."""
    signature = types.int64(types.uintp)

    def codegen(_ctx: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.load(builder.inttoptr(args[0], ir.IntType(64).as_pointer()), align=1)

    return signature, codegen


@intrinsic
def _put_word(_context: Any, address: Any, value: Any) -> Any:
    signature = types.void(types.uintp, types.int64)

    def codegen(ctx: Any, builder: Any, _signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        builder.store(args[1], pointer, align=1)
        return ctx.get_dummy_value()

    return signature, codegen


@intrinsic
def _combine(  # A call through an address: of a library that may not be there.
    _context: Any, function: Any, length: Any, k: Any, rows: Any, tables: Any, source: Any, to: Any
) -> Any:
    word = types.uintp
    signature = types.void(word, types.intc, types.intc, types.intc, word, word, word)

    def codegen(ctx: Any, builder: Any, _signature: Any, args: Any) -> Any:
        number, pointer = ir.IntType(32), ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [number] * 3 + [pointer] * 3)
        function = builder.inttoptr(args[0], kind.as_pointer())
        pointers = [builder.inttoptr(arg, pointer) for arg in args[4:]]
        builder.call(function, [*args[1:4], *pointers])
        return ctx.get_dummy_value()

    return signature, codegen


_call_combine: Any = _combine
_load: Any = _load_word
_get: Any = _get_word
_put: Any = _put_word


@njit(nogil=True, inline="always")
def get(address):
    """Read a 64-bit word at any address."""
    return _get(ADDRESS(address))


@njit(nogil=True, inline="always")
def put(address, value):
    _put(ADDRESS(address), types.int64(value))


@njit(nogil=True, inline="always")
def load(address):
    return _load(ADDRESS(address))


@njit(nogil=True, inline="always")
def combine(function, nbytes, count, rows, tables, sources, targets):
    """ISA-L's ec_encode_data, which lies at the address `function`: `rows` combinations of `count`
    vectors of `nbytes`. `sources` and `targets` are addresses of arrays of addresses."""
    _call_combine(
        ADDRESS(function), INT(nbytes), INT(count), INT(rows),
        ADDRESS(tables), ADDRESS(sources), ADDRESS(targets),
    )  # fmt: skip


@njit(nogil=True, inline="always")
def copy(target, source, nbytes):
    _memcpy(ADDRESS(target), ADDRESS(source), ADDRESS(nbytes))


@njit(nogil=True, inline="always")
def move(target, source, nbytes):
    """The ranges may overlap."""
    _memmove(ADDRESS(target), ADDRESS(source), ADDRESS(nbytes))


@njit(nogil=True)
def errno():
    return load(_errno() & ~ADDRESS(7)) >> ((_errno() & ADDRESS(7)) * 8) & 0xFFFFFFFF


@njit(nogil=True)
def outcome(n):
    """Return a call's result, or minus errno."""
    return types.int64(n) if n >= 0 else -types.int64(errno())


@njit(nogil=True)
def receive(fd, target, nbytes):
    """Blocks until something came: its bytes; 0: the peer is gone; negative: an error."""
    return types.int64(_recv(INT(fd), ADDRESS(target), ADDRESS(nbytes), INT(0)))


@njit(nogil=True)
def receive_now(fd, target, nbytes):
    """The bytes that came, 0: the peer is gone, or minus errno (EAGAIN: nothing is there)."""
    while True:
        n = outcome(_recv(INT(fd), ADDRESS(target), ADDRESS(nbytes), INT(NO_WAIT)))
        if n != -EINTR:
            return n


@njit(nogil=True)
def send(fd, source, nbytes, flags):
    """The bytes that left, or minus errno."""
    while True:
        n = outcome(_send(INT(fd), ADDRESS(source), ADDRESS(nbytes), INT(flags | NO_SIGNAL)))
        if n != -EINTR:
            return n


@njit(nogil=True)
def send_all(fd, source, nbytes):
    """Blocks. False: the peer is gone."""
    sent = 0
    while sent < nbytes:
        n = send(fd, source + sent, nbytes - sent, 0)
        if n <= 0:
            return False
        sent += n
    return True


@njit(nogil=True)
def send_message_now(fd, message):
    """sendmsg of a struct msghdr; the bytes that left, or minus errno."""
    while True:
        n = outcome(_sendmsg(INT(fd), ADDRESS(message), INT(NO_SIGNAL | NO_WAIT)))
        if n != -EINTR:
            return n


@njit(nogil=True)
def send_vector(fd, vector, count, message):
    """Send `count` (address, bytes) pairs wholly, and use them up. Blocks. False: the peer is gone.
    `message`: the address of 56 bytes, zeros at first (a struct msghdr)."""
    while count > 0:
        put(message + 16, vector)
        put(message + 24, count)
        n = outcome(_sendmsg(INT(fd), ADDRESS(message), INT(NO_SIGNAL)))
        if n == -EINTR:
            continue
        if n <= 0:
            return False
        while count > 0 and n >= get(vector + 8):
            n -= get(vector + 8)
            vector += 16
            count -= 1
        if n > 0:
            put(vector, get(vector) + n)
            put(vector + 8, get(vector + 8) - n)
    return True


@njit(nogil=True)
def await_event(fd, events, scratch):
    """Until the descriptor is ready, or failed. `scratch`: the address of 8 bytes."""
    put(scratch, fd | events << 32)
    while _poll(ADDRESS(scratch), types.uint64(1), INT(-1)) < 0 and errno() == EINTR:
        pass


@njit(nogil=True)
def await_readable(fd, limit_ns, scratch):
    """True when something came or the peer is gone; False after `limit_ns`, below a second.
    `scratch`: the address of 24 bytes."""
    put(scratch, fd | POLL_IN << 32)
    put(scratch + 8, 0)
    put(scratch + 16, limit_ns)
    return _ppoll(ADDRESS(scratch), types.uint64(1), ADDRESS(scratch + 8), ADDRESS(0)) > 0


@njit(nogil=True)
def await_any(fds, count, limit_ns, scratch):
    """Return how many of the `count` struct pollfd at `fds` are ready; 0 after `limit_ns`, which is
    below a second. `scratch`: the address of 16 bytes."""
    put(scratch, 0)
    put(scratch + 8, limit_ns)
    return _ppoll(ADDRESS(fds), types.uint64(count), ADDRESS(scratch), ADDRESS(0))


@njit(nogil=True)
def now_ns(scratch):
    """The monotonic clock. `scratch`: the address of 16 bytes."""
    _clock_gettime(INT(_MONOTONIC), ADDRESS(scratch))
    return get(scratch) * 1_000_000_000 + get(scratch + 8)


@njit(nogil=True)
def write_vector(fd, vector, count, offset):
    """pwritev of `count` (address, bytes) pairs; the bytes written, or minus errno."""
    return outcome(_pwritev(INT(fd), ADDRESS(vector), INT(count), types.int64(offset)))


@njit(nogil=True)
def signal(eventfd, one):
    """Make it readable. `one`: the address of a word that holds 1."""
    _write(INT(eventfd), ADDRESS(one), ADDRESS(8))


@njit(nogil=True)
def sleep_us(microseconds):
    _usleep(types.uint32(microseconds))


@njit(nogil=True, inline="always")
def lock(mutex):
    _mutex_lock(ADDRESS(mutex))


@njit(nogil=True, inline="always")
def unlock(mutex):
    _mutex_unlock(ADDRESS(mutex))


@njit(nogil=True)
def wait(condition, mutex):
    _cond_wait(ADDRESS(condition), ADDRESS(mutex))


@njit(nogil=True)
def wait_for(condition, mutex, limit_ns, scratch):
    """Wait like `wait`, for `limit_ns` at most. `scratch`: the address of 16 bytes."""
    _clock_gettime(INT(_MONOTONIC), ADDRESS(scratch))
    until_ns = get(scratch + 8) + limit_ns
    put(scratch, get(scratch) + until_ns // 1_000_000_000)
    put(scratch + 8, until_ns % 1_000_000_000)
    _cond_clockwait(ADDRESS(condition), ADDRESS(mutex), INT(_MONOTONIC), ADDRESS(scratch))


@njit(nogil=True)
def wake(condition):
    _cond_broadcast(ADDRESS(condition))
