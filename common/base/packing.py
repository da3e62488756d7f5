"""Pack what a program gives us to keep or to send: numbers, text and numpy's arrays within tuples,
lists and maps.

msgpack with extensions, so that what comes back is of the types that went in, and pickle is never
needed. What cannot be given back as it was is refused by name.
"""

import re
from collections.abc import Callable
from typing import Any, Final

import msgspec
import numpy as np

from slackwater.common.base.errors import Rejected

ARRAY: Final = 2
TUPLE: Final = 3
_PLAIN: Final = (type(None), bool, int, float, str, bytes)
Other = Callable[[Any], msgspec.msgpack.Ext | None]
"""Packs objects of one more kind; None: it is another one."""
Unpack = Callable[[int, memoryview], Any]


class PackedArray(msgspec.Struct, frozen=True, array_like=True):
    dtype: str
    shape: list[int]
    data: memoryview


encode: Callable[[Any], bytes] = msgspec.msgpack.Encoder().encode


class Packing:
    """`what`: how errors call the objects; `remedy`: what to give instead; `other` and `unpack`:
    for extensions of the caller's own."""

    def __init__(
        self, what: str, remedy: str, other: Other | None = None, unpack: Unpack | None = None
    ) -> None:
        self._what, self._remedy, self._other, self._unpack = what, remedy, other, unpack
        self._decoder = msgspec.msgpack.Decoder(ext_hook=self._extension)
        self._array = msgspec.msgpack.Decoder(PackedArray)

    def pack(self, value: Any) -> bytes:
        """Raises Rejected."""
        try:
            return encode(self._plain(value))
        except OverflowError as error:
            raise Rejected(f"{self._what} has a number of more than 64 bits ({error})") from error

    def unpack(self, data: bytes | bytearray | memoryview) -> Any:
        """Return the packed object. Arrays are new ones, and may be written. Raises Rejected for
        bytes that `pack` did not make."""
        try:
            return self._decoder.decode(data)
        except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
            raise Rejected(f"{self._what} is damaged: {error}") from error

    def _plain(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if self._other is not None and (packed := self._other(value)) is not None:
            return packed
        if isinstance(value, np.ndarray | np.generic):
            return msgspec.msgpack.Ext(ARRAY, self._packed(np.asarray(value), value))
        if kind is tuple:
            return msgspec.msgpack.Ext(TUPLE, encode([self._plain(one) for one in value]))
        if kind is list:
            return [self._plain(one) for one in value]
        if kind is dict and all(type(key) in (str, int) for key in value):
            return {key: self._plain(one) for key, one in value.items()}
        raise Rejected(
            f"{self._what} has a {kind.__qualname__}, which cannot be kept: {self._remedy}"
        )

    def _packed(self, array: np.ndarray[Any, Any], value: Any) -> bytes:
        if array.dtype.hasobject or array.dtype.names is not None:
            raise Rejected(
                f"{self._what} has an array of {array.dtype}: only plain numbers can be kept"
            )
        scalar = "" if isinstance(value, np.ndarray) else "scalar "
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return encode(PackedArray(scalar + array.dtype.str, list(array.shape), flat.data))

    def _extension(self, code: int, data: memoryview) -> Any:
        if code == TUPLE:
            return tuple(self._decoder.decode(data))
        if code == ARRAY:
            packed = self._array.decode(data)
            dtype = re.sub("^scalar ", "", packed.dtype)
            array = np.frombuffer(bytearray(packed.data), dtype).reshape(packed.shape)
            return array[()] if packed.dtype.startswith("scalar ") else array
        if self._unpack is None:
            raise ValueError(f"an extension {code}")
        return self._unpack(code, data)


ARRAYS: Final = Packing("a value", "give arrays, numbers and text, in tuples, lists and maps")
"""Packs numpy's arrays and plain values alone."""
