"""The one codec: every message and every stored record is encoded and decoded here.

Bytes from the bus are hostile until decoded. The size is checked before anything is parsed, floats
must be finite (msgpack carries NaN and infinity, and a schedule made of NaN compares as anything),
and a schema version of the future is refused by name instead of being half understood. msgspec
raises three unrelated exceptions for bad bytes; exactly these become `DecodeRejected`. Any other
exception is a bug of ours and is let through.

A stored record travels in an envelope of its own: type, schema version, the writer's epoch and a
CRC32 over all of it. JetStream does not notice a flipped bit in a stored value; this does.
"""

import difflib
import math
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, TypeVar, overload

import msgspec

from slackwater.common.base import limits
from slackwater.common.base.errors import DECODE_TEXT_MAX, DecodeRejected, Rejected, VersionRejected
from slackwater.schemas.base import AN_ID, ID_PATTERN, SCHEMA_VERSION, Message, Record

T = TypeVar("T")
R = TypeVar("R", bound=Record)

CONTENT_TYPE_JSON = "application/json"
_VALUE_TEXT_MAX = 80
_ID_WORDS = f"`str` matching regex {ID_PATTERN!r}"
_PATH_STEPS = re.compile(r"\.\w+|\[[^]]*\]")

refusals: Counter[str] = Counter()
"""Payloads refused since the process began: by size, version, content, non-finite, damage."""

_encode_msgpack = msgspec.msgpack.Encoder().encode
_encode_json = msgspec.json.Encoder().encode


class _Header(msgspec.Struct):
    """The part of a message that every version of the schema has."""

    t: str = ""
    v: int = SCHEMA_VERSION


class _Envelope(msgspec.Struct):
    t: str
    v: int
    epoch: int
    crc32: int
    record: msgspec.Raw


def encode(message: Message, json: bool = False) -> bytes:
    """Refuses, with `Rejected`, what no receiver would take."""
    try:
        payload = _encode_json(message) if json else _encode_msgpack(message)
    except (OverflowError, UnicodeEncodeError) as error:
        raise Rejected(f"{type(message).__name__} cannot be encoded: {error}") from error
    if len(payload) > limits.MESSAGE_BYTES_MAX:
        raise Rejected(
            f"{type(message).__name__} of {len(payload)} bytes is over a message's "
            f"{limits.MESSAGE_BYTES_MAX}; move large state over the transport"
        )
    return payload


@overload
def decode(payload: bytes, kind: type[T], json: bool = False) -> T: ...
@overload
def decode(payload: bytes, kind: Any, json: bool = False) -> Any: ...
def decode(payload: bytes, kind: Any, json: bool = False) -> Any:
    """The message in `payload`, of the struct or union of structs `kind`."""
    if len(payload) > limits.MESSAGE_BYTES_MAX:
        raise _refusal(
            "size",
            f"a message of {len(payload)} bytes is over the limit of {limits.MESSAGE_BYTES_MAX}; "
            "nothing of it was read",
        )
    read, floats = _reader(kind, json)
    try:
        message = read(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        _check_version(_header(payload, json))
        raise _refusal("content", f"not a {_name(kind)}: {_plain(str(error))}") from error
    if getattr(message, "v", SCHEMA_VERSION) > SCHEMA_VERSION:
        _check_version(message)
    if floats:
        path = _non_finite(message, "$")
        if path is not None:
            raise _refusal("non-finite", f"not a {_name(kind)}: {path} is not a finite number")
    return message


def check_keys(payload: bytes, message: Any) -> None:
    """Refuse the JSON that `message` was decoded from if it has a key that none of its structs
    knows. Raises DecodeRejected, which names the nearest."""
    found = _unknown_key(msgspec.json.decode(payload), message, "")
    if found is not None:
        raise _refusal("content", f"not a {type(message).__name__}: {found}")


def unknown_key(at: str, key: str, known: Iterable[str]) -> str:
    """Say what is wrong with an unknown key; `at` is the prefix of its path."""
    names = list(known)
    return (
        f"unknown key {at}{key}; the nearest is {at}{nearest(key, names)} (all: {', '.join(names)})"
    )


def nearest(key: str, known: Iterable[str]) -> str:
    """The known key that somebody who wrote `key` most likely meant."""
    near = difflib.get_close_matches(key, [*known], n=1, cutoff=0.0)
    return near[0] if near else "-"


def _unknown_key(raw: Any, value: Any, at: str) -> str | None:
    inner: Iterable[tuple[Any, Any, str]] = ()
    if isinstance(value, msgspec.Struct) and isinstance(raw, dict):
        kind = type(value)
        names = dict(zip(kind.__struct_encode_fields__, kind.__struct_fields__, strict=True))
        tag = kind.__struct_config__.tag_field
        for key in raw:
            if key not in names and key != tag:
                return unknown_key(at, key, names)
        inner = (
            (raw[key], getattr(value, name), f"{at}{key}.")
            for key, name in names.items()
            if key in raw
        )
    elif isinstance(value, (tuple, list)) and isinstance(raw, list):
        inner = ((*pair, at) for pair in zip(raw, value, strict=False))
    elif isinstance(value, dict) and isinstance(raw, dict):
        inner = ((raw[key], found, f"{at}{key}.") for key, found in value.items() if key in raw)
    return next(filter(None, (_unknown_key(*each) for each in inner)), None)


def looks_like_json(payload: bytes) -> bool:
    """A message is a map, and no map of msgpack begins with '{': a person wrote this by hand."""
    return payload[:1] == b"{"


def encode_record(record: Record, epoch: int) -> bytes:
    """The value of a bucket's key. Any msgpack reader shows it: the record is a map within.

    It is read back at once: what no later life could read is refused now, with field and value,
    before anything of it is stored."""
    name = type(record).__name__
    try:
        body = _encode_msgpack(record)
        again = _decoder(type(record), False).decode(body)
    except (OverflowError, UnicodeError, RecursionError, msgspec.DecodeError) as error:
        raise Rejected(f"{name} cannot be stored: {_fault(record, error)}") from error
    path = _non_finite(again, "$")
    if path is not None:
        raise Rejected(f"{name} cannot be stored: {path} is not a finite number")
    crc = _checksum(name, SCHEMA_VERSION, epoch, body)
    value = _encode_msgpack(_Envelope(name, SCHEMA_VERSION, epoch, crc, msgspec.Raw(body)))
    if len(value) > limits.RECORD_BYTES_MAX:
        raise Rejected(
            f"{name} of {len(value)} bytes is over the {limits.RECORD_BYTES_MAX} bytes of a record"
        )
    return value


def decode_record(value: bytes, kind: type[R], key: str) -> tuple[R, int]:
    """The record under `key`, and its writer's epoch; a damaged or foreign value is refused."""
    if len(value) > limits.RECORD_BYTES_MAX:
        raise _refusal(
            "size",
            f"key {key}: {len(value)} bytes are over the limit of {limits.RECORD_BYTES_MAX}",
        )
    try:
        envelope = _decoder(_Envelope, False).decode(value)
        body = bytes(envelope.record)
        if envelope.crc32 != _checksum(envelope.t, envelope.v, envelope.epoch, body):
            raise _refusal(
                "damage", f"key {key}: the value is damaged (CRC32 differs); restore the bucket"
            )
        _check_version(envelope, f"key {key}: ")
        if envelope.t != kind.__name__:
            raise _refusal("content", f"key {key}: holds a {envelope.t}, not a {kind.__name__}")
        record = _decoder(kind, False).decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _refusal("content", f"key {key}: not a stored {kind.__name__}: {error}") from error
    path = _non_finite(record, "$")
    if path is not None:
        raise _refusal("non-finite", f"key {key}: {path} is not a finite number")
    return record, envelope.epoch


def _plain(text: str) -> str:
    """The decoder's words, without the expression that ids are matched by."""
    return text.replace(_ID_WORDS, AN_ID)


def _fault(record: Record, error: Exception) -> str:
    """Say what is wrong with which field, and the value that is there."""
    text = str(error)
    found: Any = record
    for step in _PATH_STEPS.findall(text.partition(" - at ")[2]):
        try:
            found = getattr(found, step[1:]) if step[0] == "." else found[int(step[1:-1])]
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            return text  # Within a map, whose keys the path does not name.
    return text if found is record else f"{text}, not {repr(found)[:_VALUE_TEXT_MAX]}"


def _checksum(name: str, version: int, epoch: int, body: bytes) -> int:
    # surrogatepass: the name may come from damaged bytes, and must only differ, not raise.
    head = f"{name}/{version}/{epoch}/".encode("utf-8", "surrogatepass")
    return zlib.crc32(body, zlib.crc32(head))


def _refusal(why: str, text: str) -> DecodeRejected:
    refusals[why] += 1
    return VersionRejected(text) if why == "version" else DecodeRejected(text)


def shortened(text: str) -> str:
    """Cut a text that may quote a peer to one line of at most DECODE_TEXT_MAX characters."""
    return " ".join(text[: 4 * DECODE_TEXT_MAX].split())[:DECODE_TEXT_MAX]


def _header(payload: bytes, json: bool) -> _Header:
    try:
        return _decoder(_Header, json).decode(payload)  # type: ignore[no-any-return]  # cached
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _Header()  # Not a map of ours at all: the first error says more.


def _check_version(message: Any, where: str = "") -> None:
    version = getattr(message, "v", SCHEMA_VERSION)
    if version > SCHEMA_VERSION:
        raise _refusal(
            "version",
            f"{where}schema version {version} is not known here (up to {SCHEMA_VERSION}); "
            "upgrade this process first",
        )


@cache
def _decoder(kind: Any, json: bool) -> Any:
    return msgspec.json.Decoder(kind) if json else msgspec.msgpack.Decoder(kind)


@cache
def _reader(kind: Any, json: bool) -> tuple[Callable[[bytes], Any], bool]:
    """Decodes `kind`; whether a float of it could be other than finite."""
    return _decoder(kind, json).decode, _holds_float(msgspec.inspect.type_info(kind), set())


def _name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else "message of the expected types"


# Floats must be finite ----------------------------------------------------------------------------


def _non_finite(value: Any, path: str) -> str | None:
    """Where in `value` a float is NaN or infinite. Fields that cannot hold one are not visited: the
    decoder refuses both where a float is bounded at both ends."""
    if type(value) is float:
        return None if math.isfinite(value) else path
    if isinstance(value, msgspec.Struct):
        for name in _float_fields(type(value)):
            found = _non_finite(getattr(value, name), f"{path}.{name}")
            if found is not None:
                return found
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            found = _non_finite(item, f"{path}[{index}]")
            if found is not None:
                return found
    elif isinstance(value, dict):
        for item in value.values():
            found = _non_finite(item, f"{path}[...]")
            if found is not None:
                return found
    return None


@cache
def _float_fields(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    info = msgspec.inspect.type_info(kind)
    assert isinstance(info, msgspec.inspect.StructType)
    return tuple(field.name for field in info.fields if _holds_float(field.type, {kind}))


def _holds_float(info: msgspec.inspect.Type, seen: set[Any]) -> bool:
    match info:
        case msgspec.inspect.FloatType():
            low = info.ge if info.gt is None else info.gt
            return low is None or (info.le if info.lt is None else info.lt) is None
        case msgspec.inspect.AnyType():
            return True
        case msgspec.inspect.StructType():
            if info.cls in seen:
                return False
            return any(_holds_float(field.type, seen | {info.cls}) for field in info.fields)
        case msgspec.inspect.UnionType():
            return any(_holds_float(member, seen) for member in info.types)
        case msgspec.inspect.DictType():
            return _holds_float(info.value_type, seen)
        case msgspec.inspect.TupleType():
            return any(_holds_float(item, seen) for item in info.item_types)
        case msgspec.inspect.CollectionType():
            return _holds_float(info.item_type, seen)
        case _:
            return False
