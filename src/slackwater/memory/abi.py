"""What the kernels need of the C library and the processor: called without the interpreter lock.

The symbols are looked up in the process, so compiled code can be kept on disk. Addresses are plain
integers here; whoever passes one keeps its memory alive for as long as the call runs.
"""

# numba infers the compiled functions' types itself, and its decorators mislead the type checker.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,import-untyped,untyped-decorator"

from typing import Any, Final

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

INT: Any = types.intc
ADDRESS: Any = types.uintp
SIZE: Any = types.intp

_memcpy: Any = types.ExternalFunction("memcpy", ADDRESS(ADDRESS, ADDRESS, ADDRESS))
_memmove: Any = types.ExternalFunction("memmove", ADDRESS(ADDRESS, ADDRESS, ADDRESS))
_errno: Any = types.ExternalFunction("__errno_location", ADDRESS())
_recv: Any = types.ExternalFunction("recv", SIZE(INT, ADDRESS, ADDRESS, INT))
_send: Any = types.ExternalFunction("send", SIZE(INT, ADDRESS, ADDRESS, INT))
_pwritev: Any = types.ExternalFunction("pwritev", SIZE(INT, ADDRESS, INT, types.int64))
_usleep: Any = types.ExternalFunction("usleep", INT(types.uint32))
_mutex_lock: Any = types.ExternalFunction("pthread_mutex_lock", INT(ADDRESS))
_mutex_unlock: Any = types.ExternalFunction("pthread_mutex_unlock", INT(ADDRESS))
_cond_wait: Any = types.ExternalFunction("pthread_cond_wait", INT(ADDRESS, ADDRESS))
_cond_broadcast: Any = types.ExternalFunction("pthread_cond_broadcast", INT(ADDRESS))

MUTEX_BYTES: Final = 64
"""At least sizeof(pthread_mutex_t); all zeros is an unlocked one, as PTHREAD_MUTEX_INITIALIZER."""
COND_BYTES: Final = 64
_NO_SIGNAL: Final = 0x4000


@intrinsic
def _load_word(_context: Any, address: Any) -> Any:
    """One aligned 64-bit word, not read before anything that comes earlier in the program."""
    signature = types.int64(types.uintp)

    def codegen(_ctx: Any, builder: Any, _signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        builder.fence("seq_cst")
        return builder.load_atomic(pointer, "acquire", 8)

    return signature, codegen


_load: Any = _load_word


@njit(nogil=True, inline="always")
def load(address):
    return _load(ADDRESS(address))


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
def receive(fd, target, nbytes):
    """Blocks until something came: its bytes; 0: the peer is gone; negative: an error."""
    return types.int64(_recv(INT(fd), ADDRESS(target), ADDRESS(nbytes), INT(0)))


@njit(nogil=True)
def send_all(fd, source, nbytes):
    """Blocks. False: the peer is gone."""
    sent = 0
    while sent < nbytes:
        n = types.int64(
            _send(INT(fd), ADDRESS(source + sent), ADDRESS(nbytes - sent), INT(_NO_SIGNAL))
        )
        if n <= 0:
            return False
        sent += n
    return True


@njit(nogil=True)
def write_vector(fd, vector, count, offset):
    """pwritev of `count` (address, bytes) pairs; the bytes written, or minus errno."""
    n = types.int64(_pwritev(INT(fd), ADDRESS(vector), INT(count), types.int64(offset)))
    return n if n >= 0 else -types.int64(errno())


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
def wake(condition):
    _cond_broadcast(ADDRESS(condition))
