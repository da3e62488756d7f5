"""A sample of a data set as bytes, and back: tensors and arrays within tuples, lists and maps.

msgpack with three extensions, so that what comes back is of the types that went in. What cannot be
given back as it was (a tensor on a GPU or with a gradient, objects of a program's own) is refused
by name.
"""

import re
from collections.abc import Callable
from typing import Any, Final

import msgspec
import numpy as np
import torch

from slackwater.common.base.errors import Rejected

_TENSOR: Final = 1
_ARRAY: Final = 2
_TUPLE: Final = 3
_PLAIN: Final = (type(None), bool, int, float, str, bytes)


class _Packed(msgspec.Struct, frozen=True, array_like=True):
    dtype: str
    shape: list[int]
    data: memoryview


def pack(sample: Any) -> bytes:
    """Raises Rejected."""
    try:
        return _encode(_plain(sample))
    except OverflowError as error:
        raise Rejected(f"a sample has a number of more than 64 bits ({error})") from error


def unpack(data: bytes | bytearray) -> Any:
    """Return the packed object. Tensors and arrays are new ones, and may be written."""
    return _decoder.decode(data)


_encode: Callable[[Any], bytes] = msgspec.msgpack.Encoder().encode


def _plain(value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        return msgspec.msgpack.Ext(_TENSOR, _tensor(value))
    if isinstance(value, np.ndarray | np.generic):
        return msgspec.msgpack.Ext(_ARRAY, _array(np.asarray(value), value))
    if kind is tuple:
        return msgspec.msgpack.Ext(_TUPLE, _encode([_plain(one) for one in value]))
    if kind is list:
        return [_plain(one) for one in value]
    if kind is dict and all(type(key) in (str, int) for key in value):
        return {key: _plain(one) for key, one in value.items()}
    raise Rejected(
        f"a sample has a {kind.__qualname__}, which cannot be kept: have the data set give "
        "tensors, arrays, numbers and text, in tuples, lists and maps"
    )


def _tensor(value: torch.Tensor) -> bytes:
    fits = type(value) is torch.Tensor and value.layout is torch.strided and not value.is_quantized
    if not fits or value.device.type != "cpu" or value.requires_grad:
        raise Rejected(
            f"a sample has a tensor on {value.device}{' with a gradient' * value.requires_grad}: "
            "only plain tensors of the CPU without one can be kept"
        )
    # Zero-dimensional ones cannot be viewed as bytes.
    flat = value.contiguous().reshape(-1).view(torch.uint8).numpy()
    name = str(value.dtype).removeprefix("torch.")
    return _encode(_Packed(name, list(value.shape), flat.data))


def _array(array: np.ndarray[Any, Any], value: Any) -> bytes:
    if array.dtype.hasobject or array.dtype.names is not None:
        raise Rejected(f"a sample has an array of {array.dtype}: only plain numbers can be kept")
    scalar = "" if isinstance(value, np.ndarray) else "scalar "
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return _encode(_Packed(scalar + array.dtype.str, list(array.shape), flat.data))


def _extension(code: int, data: memoryview) -> Any:
    if code == _TUPLE:
        return tuple(_decoder.decode(data))
    packed = _packed.decode(data)
    copied = bytearray(packed.data)
    if code == _TENSOR:
        dtype = getattr(torch, packed.dtype)
        made = torch.frombuffer(copied, dtype=dtype) if copied else torch.empty(0, dtype=dtype)
        return made.reshape(packed.shape)
    assert code == _ARRAY, code
    array = np.frombuffer(copied, re.sub("^scalar ", "", packed.dtype)).reshape(packed.shape)
    return array[()] if packed.dtype.startswith("scalar ") else array


_decoder: Final = msgspec.msgpack.Decoder(ext_hook=_extension)
_packed: Final = msgspec.msgpack.Decoder(_Packed)
