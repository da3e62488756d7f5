"""BLOCK_STATUS: what is agreed upon in the handshake, and which extents a range has."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackwater.memory.nbd import protocol as nbd
from slackwater.memory.nbd.extents import EXTENTS_MAX, extents
from slackwater.memory.nbd.handshake import Export, Handshake
from slackwater.memory.store import PAGE_BYTES


def contexts(name: bytes, *queries: bytes) -> bytes:
    words = [len(name).to_bytes(4, "big") + name, len(queries).to_bytes(4, "big")]
    return b"".join([*words, *(len(query).to_bytes(4, "big") + query for query in queries)])


def kinds(reply: bytes) -> list[int]:
    found = []
    while reply:
        _, _, kind, length = nbd.OPTION_REPLY.unpack(reply[: nbd.OPTION_REPLY.size])
        found.append(kind)
        reply = reply[nbd.OPTION_REPLY.size + length :]
    return found


def shaken() -> Handshake:
    shake = Handshake(Export("d1", 1 << 20))
    shake.option(nbd.OPT_STRUCTURED_REPLY, b"")
    return shake


@pytest.mark.parametrize("queries", [(nbd.ALLOCATION,), (b"other:thing", nbd.ALLOCATION)])
def test_allocation_is_agreed_upon(queries: tuple[bytes, ...]) -> None:
    shake = shaken()
    reply = shake.option(nbd.OPT_SET_META_CONTEXT, contexts(b"d1", *queries))
    assert kinds(reply) == [nbd.REP_META_CONTEXT, nbd.REP_ACK]
    assert shake.allocation


@pytest.mark.parametrize(
    ("body", "answer"),
    [
        (contexts(b"d1"), [nbd.REP_ACK]),
        (contexts(b"d1", b"base:"), [nbd.REP_ACK]),
        (contexts(b"d2", nbd.ALLOCATION), [nbd.REP_ERR_UNKNOWN]),
        (contexts(b"d1", nbd.ALLOCATION)[:-1], [nbd.REP_ERR_INVALID]),
        (contexts(b"d1", nbd.ALLOCATION) + b"x", [nbd.REP_ERR_INVALID]),
        (b"", [nbd.REP_ERR_INVALID]),
        (b"\0\0\0\0" + b"\xff" * 4, [nbd.REP_ERR_INVALID]),
    ],
    ids=["nothing", "a whole namespace", "no export", "short", "long", "empty", "many"],
)
def test_what_is_not_a_choice_of_it(body: bytes, answer: list[int]) -> None:
    """A choice that fails ends the one that was made before."""
    shake = shaken()
    shake.option(nbd.OPT_SET_META_CONTEXT, contexts(b"", nbd.ALLOCATION))
    assert kinds(shake.option(nbd.OPT_SET_META_CONTEXT, body)) == answer
    assert not shake.allocation


def test_contexts_are_listed_and_need_structured_replies() -> None:
    shake = Handshake(Export("d1", 1 << 20))
    body = contexts(b"d1", nbd.ALLOCATION)
    assert kinds(shake.option(nbd.OPT_SET_META_CONTEXT, body)) == [nbd.REP_ERR_INVALID]
    shake.option(nbd.OPT_STRUCTURED_REPLY, b"")
    for queries in ((), (b"base:",), (nbd.ALLOCATION,)):
        reply = shake.option(nbd.OPT_LIST_META_CONTEXT, contexts(b"d1", *queries))
        assert kinds(reply) == [nbd.REP_META_CONTEXT, nbd.REP_ACK]
    reply = shake.option(nbd.OPT_LIST_META_CONTEXT, contexts(b"d1", b"qemu:"))
    assert kinds(reply) == [nbd.REP_ACK]
    assert not shake.allocation


@given(
    allocated=st.lists(st.booleans(), min_size=1, max_size=40),
    skip=st.integers(0, PAGE_BYTES - 1),
    cut=st.integers(0, PAGE_BYTES - 1),
    one=st.booleans(),
)
def test_extents_are_the_pages(allocated: list[bool], skip: int, cut: int, one: bool) -> None:
    """Byte by byte what the pages say, from the range's start on, and no further than its end."""
    offset = 7 * PAGE_BYTES + skip
    length = max(1, len(allocated) * PAGE_BYTES - skip - cut)
    found = extents(offset, length, np.array(allocated), one=one)
    assert all(nbytes > 0 for nbytes, _ in found)
    assert all(a[1] != b[1] for a, b in itertools.pairwise(found))
    total = sum(nbytes for nbytes, _ in found)
    assert total <= length
    assert len(found) == 1 if one else total == length
    at = skip
    for nbytes, flags in found:
        pages = allocated[at // PAGE_BYTES : (at + nbytes - 1) // PAGE_BYTES + 1]
        assert set(pages) == {flags == 0}
        at += nbytes


def test_a_checkered_range_is_answered_in_part() -> None:
    pages = np.arange(4 * EXTENTS_MAX) % 2 == 0
    assert len(extents(0, len(pages) * PAGE_BYTES, pages, one=False)) == EXTENTS_MAX
