"""Requests that do not begin or end at a page's border, on a device that knows pages only.

A part of a page is written by reading the page, changing it and writing it back, if nobody wrote
the span meanwhile; else it is done again. Such writes take turns, so that neighbours within a page
do not undo each other.
"""

import asyncio
import errno
from typing import Final

import numpy as np

from slackwater.memory.pages.device import Device
from slackwater.memory.pages.table import page_range
from slackwater.memory.prefetch.readahead import ReadAhead
from slackwater.memory.store import PAGE_BYTES, Pages

_ATTEMPTS_MAX: Final = 256


def covering(offset: int, length: int) -> Pages:
    """The pages that a range of bytes touches."""
    first = offset // PAGE_BYTES
    return page_range(first, (offset + length - 1) // PAGE_BYTES - first + 1)


def whole_pages(offset: int, length: int) -> tuple[int, int]:
    """(first page, count) of the whole pages inside a range of bytes."""
    first = -(-offset // PAGE_BYTES)
    return first, max(0, (offset + length) // PAGE_BYTES - first)


async def read_bytes(ahead: ReadAhead, offset: int, length: int) -> tuple[memoryview, int]:
    """Read bytes. Return them, and what was waited for."""
    pages = covering(offset, length)
    buffer = np.empty(len(pages) * PAGE_BYTES, np.uint8).data
    cause = await ahead.read_pages(pages, buffer)
    start = offset % PAGE_BYTES
    return buffer[start : start + length], cause


async def write_bytes(device: Device, turn: asyncio.Lock, offset: int, payload: memoryview) -> None:
    end = offset + len(payload)
    first, count = whole_pages(offset, len(payload))
    if count:
        start = first * PAGE_BYTES - offset
        whole = payload[start : start + count * PAGE_BYTES]
        await device.write_pages(page_range(first, count), whole)
    for page in sorted({offset // PAGE_BYTES, (end - 1) // PAGE_BYTES}):
        begin, stop = max(offset, page * PAGE_BYTES), min(end, (page + 1) * PAGE_BYTES)
        if stop - begin < PAGE_BYTES:
            part = payload[begin - offset : stop - offset]
            async with turn:
                await _patch(device, page, begin - page * PAGE_BYTES, part)


async def _patch(device: Device, page: int, start: int, part: memoryview) -> None:
    pages = page_range(page, 1)
    buffer = np.empty(PAGE_BYTES, np.uint8).data
    for _ in range(_ATTEMPTS_MAX):
        span, version = device.version(page)
        await device.read_pages(pages, buffer)
        buffer[start : start + len(part)] = part
        if await device.write_if(pages, buffer, span, version):
            return
    raise OSError(errno.EIO, f"page {page} is written again and again by others")
