"""A sample of a data set as bytes, and back: tensors and arrays within tuples, lists and maps
(common/base/packing.py). What cannot be given back as it was (a tensor on a GPU or with a gradient,
objects of a program's own) is refused by name.
"""

from typing import Any, Final

import msgspec
import torch

from slackwater.common.base.errors import Rejected
from slackwater.common.base.packing import PackedArray, Packing, encode

_TENSOR: Final = 1


def pack(sample: Any) -> bytes:
    """Raises Rejected."""
    return _packing.pack(sample)


def unpack(data: bytes | bytearray) -> Any:
    """Return the packed object. Tensors and arrays are new ones, and may be written."""
    return _packing.unpack(data)


def _tensor(value: Any) -> msgspec.msgpack.Ext | None:
    if not isinstance(value, torch.Tensor):
        return None
    fits = type(value) is torch.Tensor and value.layout is torch.strided and not value.is_quantized
    if not fits or value.device.type != "cpu" or value.requires_grad:
        raise Rejected(
            f"a sample has a tensor on {value.device}{' with a gradient' * value.requires_grad}: "
            "only plain tensors of the CPU without one can be kept"
        )
    # Zero-dimensional ones cannot be viewed as bytes.
    flat = value.contiguous().reshape(-1).view(torch.uint8).numpy()
    name = str(value.dtype).removeprefix("torch.")
    packed = encode(PackedArray(name, list(value.shape), flat.data))
    return msgspec.msgpack.Ext(_TENSOR, packed)


def _unpack(code: int, data: memoryview) -> Any:
    assert code == _TENSOR, code
    packed = _decode(data)
    copied = bytearray(packed.data)
    dtype = getattr(torch, packed.dtype)
    made = torch.frombuffer(copied, dtype=dtype) if copied else torch.empty(0, dtype=dtype)
    return made.reshape(packed.shape)


_decode: Final = msgspec.msgpack.Decoder(PackedArray).decode
_packing: Final = Packing(
    "a sample",
    "have the data set give tensors, arrays, numbers and text, in tuples, lists and maps",
    _tensor,
    _unpack,
)
