"""The code against a field that is written out, and every way to lose r (Hydra, 4.1)."""

import itertools
import struct
import zlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slackwater.common.base.errors import ConfigRejected
from slackwater.memory.resilience import fragments, scatter
from slackwater.memory.resilience.coding import Code, ErasureCode
from slackwater.memory.resilience.replication import Copies
from slackwater.memory.store import PAGE_BYTES, RemoteMember

# GF(256) as the textbook has it: slow, obvious, without tables. The reference for ISA-L.
POLYNOMIAL = 0x11D


def times(a: int, b: int) -> int:
    """Shift and add, reduced by x^8 + x^4 + x^3 + x^2 + 1."""
    product = 0
    while b:
        if b & 1:
            product ^= a
        a <<= 1
        if a & 0x100:
            a ^= POLYNOMIAL
        b >>= 1
    return product


def inverse(a: int) -> int:
    return next(b for b in range(1, 256) if times(a, b) == 1)


def cauchy(k: int, r: int) -> list[list[int]]:
    """Identity above 1 / (i + j), i the row, j the column."""
    identity = [[int(i == j) for j in range(k)] for i in range(k)]
    return identity + [[inverse(i ^ j) for j in range(k)] for i in range(k, k + r)]


def combine(rows: Sequence[Sequence[int]], parts: Sequence[bytes]) -> list[bytes]:
    """Matrix times vector, byte by byte."""
    result = []
    for row in rows:
        made = bytearray(len(parts[0]))
        for factor, part in zip(row, parts, strict=True):
            for at, byte in enumerate(part):
                made[at] ^= times(factor, byte)
        result.append(bytes(made))
    return result


def solve(rows: Sequence[Sequence[int]], values: Sequence[bytes]) -> list[bytes]:
    """The parts of which `values` are the combinations: Gauss and Jordan."""
    left = [list(row) for row in rows]
    right = [bytes(value) for value in values]
    for column in range(len(left)):
        pivot = next(i for i in range(column, len(left)) if left[i][column])
        left[column], left[pivot] = left[pivot], left[column]
        right[column], right[pivot] = right[pivot], right[column]
        scale = inverse(left[column][column])
        left[column] = [times(scale, x) for x in left[column]]
        right[column] = bytes(times(scale, x) for x in right[column])
        for i in range(len(left)):
            factor = left[i][column]
            if i != column and factor:
                pairs = zip(left[i], left[column], strict=True)
                left[i] = [x ^ times(factor, y) for x, y in pairs]
                both = zip(right[i], right[column], strict=True)
                right[i] = bytes(x ^ times(factor, y) for x, y in both)
    return right


def some_pages(count: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, PAGE_BYTES), np.uint8)


@pytest.mark.parametrize(("k", "r"), [(8, 2), (4, 2), (2, 1), (4, 3)])
def test_the_matrix_is_cauchys(k: int, r: int) -> None:
    assert ErasureCode(k, r).matrix.tolist() == cauchy(k, r)


def test_parities_are_what_the_field_says() -> None:
    code, pages = ErasureCode(8, 2), some_pages(1)
    fragments = code.encode(pages)
    data = [fragment.tobytes() for fragment in fragments[:8, 0]]
    assert b"".join(data) == pages.tobytes()
    parities = combine(cauchy(8, 2)[8:], data)
    assert [fragment.tobytes() for fragment in fragments[8:, 0]] == parities


def test_decoding_is_what_the_field_says() -> None:
    code, pages = ErasureCode(4, 2), some_pages(1, 2)
    fragments = code.encode(pages)
    chosen = [5, 1, 4, 3]
    rows = [cauchy(4, 2)[i] for i in chosen]
    solved = solve(rows, [fragments[i, 0].tobytes() for i in chosen])
    assert b"".join(solved) == pages.tobytes()
    assert code.decode(chosen, fragments[chosen]).tobytes() == pages.tobytes()


@pytest.mark.parametrize(
    "code", [ErasureCode(8, 2), ErasureCode(4, 3), Copies(2)], ids=["8+2", "4+3", "2-copies"]
)
def test_any_k_fragments_are_the_page(code: Code) -> None:
    pages = some_pages(3, 3)
    fragments = code.encode(pages)
    for chosen in itertools.combinations(range(code.width), code.needed):
        assert (code.decode(chosen, fragments[list(chosen)]) == pages).all()


def test_any_fragment_is_made_of_any_k_others() -> None:
    code, pages = ErasureCode(8, 2), some_pages(2, 4)
    fragments = code.encode(pages)
    for lost in itertools.combinations(range(10), 2):
        chosen = [i for i in range(10) if i not in lost]
        for index in lost:
            made = code.rebuild(index, chosen, fragments[chosen])
            assert (made == fragments[index]).all()


@settings(max_examples=40)
@given(
    k=st.sampled_from([1, 2, 4, 8, 16]),
    r=st.integers(1, 4),
    count=st.integers(1, 5),
    seed=st.integers(0, 2**32),
    data=st.data(),
)
def test_whatever_is_lost(k: int, r: int, count: int, seed: int, data: st.DataObject) -> None:
    code, pages = ErasureCode(k, r), some_pages(count, seed)
    chosen = data.draw(st.permutations(range(k + r)))[:k]
    fragments = code.encode(pages)
    assert (code.decode(chosen, fragments[chosen]) == pages).all()


class Mapped:
    """A slab in this process."""

    def __init__(self, nbytes: int) -> None:
        self.memory = np.full(nbytes, 0xA5, np.uint8)
        self.mapped = self.memory.data


@settings(max_examples=60)
@given(
    code=st.sampled_from([ErasureCode(8, 2), ErasureCode(4, 3), ErasureCode(1, 1), Copies(3)]),
    places=st.lists(st.integers(0, 9), min_size=1, max_size=6, unique=True),
    kinds=st.lists(st.sampled_from(["mapped", "away", "none"]), min_size=10, max_size=10),
    generation=st.integers(1, 2**52),
    seed=st.integers(0, 99),
    sums=st.booleans(),
)
def test_one_call_makes_what_coding_and_packing_make(
    code: Code, places: list[int], kinds: list[str], generation: int, seed: int, sums: bool
) -> None:
    """Bit by bit, with ISA-L's CRC and without; nothing else of the slabs is touched."""
    pages, data = np.array(places, np.int64), some_pages(len(places), seed)
    length = fragments.slot_bytes(code)
    slabs = [Mapped(10 * length) if kind == "mapped" else None for kind in kinds[: code.width]]
    away = cast(RemoteMember, SimpleNamespace(mapped=None))
    members = [
        cast(RemoteMember, slab) if slab else (away if kind == "away" else None)
        for slab, kind in zip(slabs, kinds, strict=False)
    ]
    into = scatter.target(code, members)
    if not sums:
        into = into._replace(sums=0)
    slots = scatter.write(code, into, 7, pages, generation, data.reshape(-1).data)
    generations, parts = np.full(len(pages), generation), code.encode(data)
    for index, slab in enumerate(slabs):
        right = fragments.pack(code, index, 7, pages, generations, parts[index])
        if members[index] is not None:
            assert (slots[index] == right).all()
        if slab is not None:
            whole = np.full((10, length), 0xA5, np.uint8)
            whole[pages] = right
            assert (slab.memory.reshape(10, length) == whole).all()


@pytest.mark.parametrize(("k", "r"), [(0, 2), (8, 0), (3, 2), (32, 8)])
def test_codes_that_cannot_be(k: int, r: int) -> None:
    with pytest.raises(ConfigRejected, match=rf"{k}\+{r}"):
        ErasureCode(k, r)


def test_one_copy_is_none() -> None:
    with pytest.raises(ConfigRejected, match="1 copies"):
        Copies(1)


@pytest.mark.parametrize(
    "code", [ErasureCode(8, 2), ErasureCode(16, 1), Copies(2)], ids=["8+2", "16+1", "2-copies"]
)
def test_the_checksum_beside_a_fragment_is_zlibs(code: Code) -> None:
    """The checksum begins with what the fragment is, so that equal bytes elsewhere have another."""
    pages = np.array([0, 3, 9], np.int64)
    whole, generations = code.encode(some_pages(3)), np.array([1, 2**40, 5], np.int64)
    begins = set()
    for index in range(code.width):
        slots = fragments.pack(code, index, 7, pages, generations, whole[index])
        assert fragments.generations_of(code, index, 7, pages, slots).tolist() == [1, 2**40, 5]
        for i, page in enumerate(pages.tolist()):
            slot = slots[i].tobytes()
            generation, crc, tag = struct.unpack_from("<QII", slot)
            assert (generation, tag >> 24) == (generations[i], index)
            begin = fragments._begin(7, tag, page, generation)
            assert crc == zlib.crc32(slot[16:], begin)
            begins.add(begin)
        for other in ((index, 8, pages), (index, 7, pages + 1), (1 - index % 2, 7, pages)):
            assert not fragments.generations_of(code, *other, slots).any()
    assert len(begins) == 3 * code.width
