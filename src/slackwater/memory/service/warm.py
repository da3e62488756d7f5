"""Compile every kernel, or load it from the cache, before anybody waits for one.

A kernel is compiled when it is first called, which takes seconds; the event loop must not meet that
while a client waits. So all of them are called here on a device of eight pages, with the types that
they get later.
"""

import os
import socket
import tempfile

import numpy as np

from slackwater.memory.nbd import lanes, serve
from slackwater.memory.nbd import protocol as nbd
from slackwater.memory.nbd.state import LANE_BYTES, make_connection, untouched
from slackwater.memory.pages import kernels as k
from slackwater.memory.pages import (
    latency,
    prefetch_cache,
    prefetch_kernels,
    refill_kernels,
    states,
    writeback,
)
from slackwater.memory.pages.table import make_table, page_range
from slackwater.memory.resilience import fragments, gather, scatter
from slackwater.memory.resilience.replication import Copies
from slackwater.memory.store import PAGE_BYTES


def warm() -> None:
    table = make_table(8, 4, slots=8, places=prefetch_cache.WAYS)
    slab = np.zeros(5 * PAGE_BYTES, np.uint8)
    data = np.zeros(2 * PAGE_BYTES, np.uint8).data
    pages, kinds = page_range(0, 2), np.zeros(2, np.int64)
    k.map_span(table, 0, k.address(slab), k.address(slab) + 4 * PAGE_BYTES, 0)
    k.write_pages(table, pages, k.address(data), kinds, 0, -1)
    k.read_pages(table, pages, k.address(data), kinds, True)
    k.look(table, 0, kinds)
    k.discard(table, 0, 1)
    k.landed(table, pages, np.zeros(2, np.bool_))
    k.take_activity(table, np.zeros(2, np.int64))
    k.forget_pages(table, pages)
    prefetch_kernels.reserve(table, pages, kinds, np.zeros(2, np.int64))
    prefetch_kernels.store(
        table, kinds, np.zeros(2, np.int64), k.address(data), np.zeros(2, np.bool_)
    )
    prefetch_kernels.take_notes(
        table, np.zeros((prefetch_cache.NOTES, prefetch_cache.NOTE_WORDS), np.int64)
    )
    k.count_present(table, 0)
    refill_kernels.mark(table, 0, 2)
    refill_kernels.store(table, 0, 2, k.address(data), False)
    k.set_lane_target(table, 0, 0, 0)
    k.leave_span(table, 0, states.UNMAPPED)
    writeback.watch(table, 1)
    with tempfile.TemporaryFile() as file:
        os.ftruncate(file.fileno(), 8 * PAGE_BYTES)
        writeback.write_back(table, file.fileno())
        writeback.discarded(table)
        writeback.stop(table)
        writeback.write_back(table, file.fileno())
    writeback.backup_failed(table, 0)
    code, whole = Copies(2), np.zeros((2, PAGE_BYTES), np.uint8)
    slots = fragments.pack(code, 0, 0, pages, kinds, whole)
    fragments.generations_of(code, 0, 0, pages, slots)
    scatter.write(code, scatter.target(code, (None, None)), 0, pages, 1, data)
    nobody = gather.Near((), (), (), pages, pages, code.recipe((0,)))
    gather.read(code, nobody, 0, pages, np.zeros(2, np.int64), data)
    _serve(table, data)


def _serve(table: k.Table, data: memoryview) -> None:
    """A client that says good-bye."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        state = make_connection(ours.fileno(), 8 * PAGE_BYTES, PAGE_BYTES, chunked=True)
        theirs.sendall(nbd.REQUEST.pack(nbd.REQUEST_MAGIC, 0, nbd.DISCONNECT, 0, 0, 0))
        serve.serve(table, state)
        buffer = untouched(LANE_BYTES)
        lanes.install(table, state.lanes, 0, 1, theirs.fileno(), buffer.ctypes.data)
        lanes.drain(table, state)
        serve.send(state, k.address(data), 16)
        latency.add(state.times, latency.HIT, 0, 0)
