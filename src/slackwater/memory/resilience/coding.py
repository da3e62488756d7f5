"""Codes: how the bytes of a page become fragments, and a page again out of any `needed` of them.

Hydra (FAST'22), section 4.1: a page is split into k data fragments, r parities are their linear
combinations over GF(256), and any k of the k + r give the page back. The matrix is the identity
above a Cauchy matrix, so data fragments are the page itself and every k rows are independent. The
arithmetic is ISA-L's, called without a copy; a batch of pages is one call, because fragment i of
all of them lies in one piece. Pure: no state but constants.
"""

import ctypes
import ctypes.util
import functools
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from slackwater.common.base import limits
from slackwater.common.base.errors import ConfigRejected
from slackwater.memory.store import PAGE_BYTES

Bytes = NDArray[np.uint8]
_TABLE_BYTES: Final = 32
"""ISA-L expands a coefficient to two tables of sixteen products."""
_DECODERS_MAX: Final = 4096
_CODED_BYTES_MAX: Final = 2**31 - 1
"""ISA-L counts the bytes of a fragment in an int."""


class Recipe(NamedTuple):
    """How compiled code (gather.py) makes a page of `needed` fragments."""

    places: NDArray[np.int64]
    """By fragment: its place in the page, counted in fragments; -1: it is a parity."""
    lost: NDArray[np.int64]
    """Places that no fragment is for: combinations of all of them."""
    tables: Bytes
    multiply: int
    """The address of ISA-L's ec_encode_data, which makes them; 0: nothing is ever lost."""


class Parities(NamedTuple):
    """Tells compiled code (scatter.py) how to make the parity fragments."""

    tables: Bytes
    multiply: int
    """The address of ISA-L's ec_encode_data; 0: every fragment is the page."""


class Code(Protocol):
    """`fragments` is one array per page: fragment j of page i is `fragments[j, i]`."""

    @property
    def needed(self) -> int:
        """k."""
        ...

    @property
    def width(self) -> int:
        """k + r."""
        ...

    @property
    def fragment_bytes(self) -> int: ...

    def encode(self, pages: Bytes) -> Bytes:
        """(n, PAGE_BYTES) to (width, n, fragment_bytes)."""
        ...

    def decode(self, chosen: Sequence[int], fragments: Bytes) -> Bytes:
        """(n, PAGE_BYTES) out of the fragments `chosen`, `needed` different ones, as many rows of
        `fragments`."""
        ...

    def rebuild(self, index: int, chosen: Sequence[int], fragments: Bytes) -> Bytes:
        """(n, fragment_bytes): fragment `index`, out of others."""
        ...

    def recipe(self, chosen: Sequence[int]) -> Recipe:
        """Return the recipe by which `decode` uses these fragments."""
        ...

    def parities(self) -> Parities:
        """Return what compiled code needs to do as `encode` does."""
        ...


class ErasureCode:
    """k + r."""

    def __init__(self, k: int, r: int) -> None:
        """Raises ConfigRejected: k and r cannot be used, or ISA-L is not there."""
        if k < 1 or r < 1 or PAGE_BYTES % k or k + r > limits.SPAN_MEMBERS_MAX:
            raise ConfigRejected(
                f"coding {k}+{r}: k must divide {PAGE_BYTES}, r be at least 1, "
                f"and k + r at most {limits.SPAN_MEMBERS_MAX}; 8+2 is usual"
            )
        self.needed = k
        self.width = k + r
        self.fragment_bytes = PAGE_BYTES // k
        self._isal = isal()
        matrix = np.zeros((k + r, k), np.uint8)
        self._isal.gf_gen_cauchy1_matrix(_at(matrix), k + r, k)
        self.matrix: Bytes = matrix
        self._parity = self._tables(matrix[k:])
        self._encoding = Parities(self._parity, _address(self._isal.ec_encode_data))
        self._decoder = functools.lru_cache(_DECODERS_MAX)(self._invert)

    def encode(self, pages: Bytes) -> Bytes:
        k, n, size = self.needed, len(pages), self.fragment_bytes
        fragments = np.empty((self.width, n, size), np.uint8)
        fragments[:k] = pages.reshape(n, k, size).transpose(1, 0, 2)
        self._multiply(self._parity, fragments[:k], fragments[k:])
        return fragments

    def decode(self, chosen: Sequence[int], fragments: Bytes) -> Bytes:
        k, n = self.needed, fragments.shape[1]
        data = np.empty((k, n, self.fragment_bytes), np.uint8)
        lost, tables = self._decoder(tuple(chosen))
        for row, index in enumerate(chosen):
            if index < k:
                data[index] = fragments[row]
        if lost:
            made = np.empty((len(lost), n, self.fragment_bytes), np.uint8)
            self._multiply(tables, np.ascontiguousarray(fragments), made)
            data[lost] = made
        pages: Bytes = data.transpose(1, 0, 2).reshape(n, PAGE_BYTES)
        return pages

    def rebuild(self, index: int, chosen: Sequence[int], fragments: Bytes) -> Bytes:
        made: Bytes = self.encode(self.decode(chosen, fragments))[index]
        return made

    def recipe(self, chosen: Sequence[int]) -> Recipe:
        lost, tables = self._decoder(tuple(chosen))
        places = [index if index < self.needed else -1 for index in chosen]
        return Recipe(
            np.array(places, np.int64), np.array(lost, np.int64), tables, self._encoding.multiply
        )

    def parities(self) -> Parities:
        return self._encoding

    def _invert(self, chosen: tuple[int, ...]) -> tuple[list[int], Bytes]:
        """(data fragments that are not among these k, the tables that make them of these)."""
        assert len(chosen) == len(set(chosen)) == self.needed, chosen
        square = np.ascontiguousarray(self.matrix[list(chosen)])
        inverse = np.empty_like(square)
        singular = self._isal.gf_invert_matrix(_at(square), _at(inverse), self.needed)
        assert singular == 0, chosen
        lost = [i for i in range(self.needed) if i not in chosen]
        return lost, self._tables(inverse[lost])

    def _tables(self, rows: Bytes) -> Bytes:
        rows = np.ascontiguousarray(rows)
        tables = np.empty(rows.size * _TABLE_BYTES, np.uint8)
        self._isal.ec_init_tables(self.needed, len(rows), _at(rows), _at(tables))
        return tables

    def _multiply(self, tables: Bytes, source: Bytes, target: Bytes) -> None:
        """Each row of `target` is a combination of the rows of `source`; both C-contiguous."""
        nbytes = source[0].size
        assert source.flags.c_contiguous
        assert target.flags.c_contiguous
        assert nbytes <= _CODED_BYTES_MAX, nbytes
        self._isal.ec_encode_data(
            nbytes, len(source), len(target), _at(tables), _rows(source), _rows(target)
        )


def checksum() -> int:
    """Return the address of ISA-L's CRC-32 (zlib's), which is ten times as fast as one of tables;
    0: ISA-L is not there."""
    try:
        return _address(isal().crc32_gzip_refl)
    except (ConfigRejected, AttributeError):
        return 0


def _address(function: Any) -> int:
    found = ctypes.cast(function, ctypes.c_void_p).value
    assert found
    return found


def _at(array: Bytes) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def _rows(array: Bytes) -> "ctypes.Array[ctypes.c_void_p]":
    start, step = array.ctypes.data, array.strides[0]
    return (ctypes.c_void_p * len(array))(*(start + i * step for i in range(len(array))))


@functools.cache
def isal() -> ctypes.CDLL:
    """ISA-L: the one in pyeclib's wheel, else the system's. Raises ConfigRejected."""
    found = None
    package = importlib.util.find_spec("pyeclib")
    if package is not None and package.origin is not None:
        beside = Path(package.origin).parent.parent / "pyeclib.libs"
        found = next((str(path) for path in sorted(beside.glob("libisal*"))), None)
    found = found or ctypes.util.find_library("isal")
    if found is None:
        raise ConfigRejected(
            "erasure coding needs ISA-L: install the extra `coding` (pip install "
            "'slackwater[coding]') or the system's libisal2, or choose another resilience"
        )
    library = ctypes.CDLL(found)
    number, pointer = ctypes.c_int, ctypes.c_void_p
    library.gf_gen_cauchy1_matrix.argtypes = [pointer, number, number]
    library.gf_gen_cauchy1_matrix.restype = None
    library.gf_invert_matrix.argtypes = [pointer, pointer, number]
    library.gf_invert_matrix.restype = number
    library.ec_init_tables.argtypes = [number, number, pointer, pointer]
    library.ec_init_tables.restype = None
    library.ec_encode_data.argtypes = [number, number, number, pointer, pointer, pointer]
    library.ec_encode_data.restype = None
    return library
