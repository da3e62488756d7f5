"""A client's write of whole pages, compiled: taken in, and sent on a lane where one leads there."""

# numba infers the compiled functions' types itself, and its decorators mislead the type checker.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped"

from slackwater.common.native.compiled import kernel
from slackwater.memory.nbd import lanes
from slackwater.memory.nbd import protocol as nbd
from slackwater.memory.nbd import state as s
from slackwater.memory.pages import kernels
from slackwater.memory.store import PAGE_BYTES


@kernel()
def write(t, c, at, flags, offset, length):
    """Take in a write for whose pages there is room. It is answered at once when remote memory has
    every page, by its lane when one has them, else when what it waits for is done."""
    source = c.inward.ctypes.data + at + nbd.REQUEST_BYTES
    first, page = t.words[kernels.HEAD], offset // PAGE_BYTES
    done = True
    for i in range(length // PAGE_BYTES):
        done &= kernels.write_page(t, page + i, source + i * PAGE_BYTES) == kernels.DONE
    plain = c.words[s.DISK_BARRIER_ENTRY] < 0 and not flags & nbd.FUA
    cookie = s.cookie_of(c, at)
    if not plain or not lanes.send_write(t, c.lanes, cookie, offset, length, first):
        s.written(c, at, offset, length, flags, first, done)
