"""Every struct of the schemas, as bytes: round trip, other readers, hostile input, bounds.

The instances are generated from the types themselves, so that a new message is covered the moment
it is written.
"""

import importlib
import math
import pkgutil
import random
import re
import types
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import slackwater.schemas
from slackwater.common.base import codec
from slackwater.common.base.errors import DecodeRejected
from slackwater.schemas.base import Message, Record

inspect = msgspec.inspect


def _schema_modules() -> Iterator[types.ModuleType]:
    for found in pkgutil.iter_modules(slackwater.schemas.__path__):
        yield importlib.import_module(f"slackwater.schemas.{found.name}")


STRUCTS: list[type[msgspec.Struct]] = sorted(
    {
        one
        for module in _schema_modules()
        for one in vars(module).values()
        if isinstance(one, type)
        and issubclass(one, msgspec.Struct)
        and one not in (Message, Record)
        and one.__module__.startswith("slackwater.schemas")
    },
    key=lambda one: one.__name__,
)
MESSAGES = [one for one in STRUCTS if issubclass(one, Message)]
RECORDS = [one for one in STRUCTS if issubclass(one, Record)]
HEX_PATTERN = re.compile(r"\^\(?\[0-9a-f\]\{(\d+)\}")
every_struct = pytest.mark.parametrize("kind", STRUCTS, ids=lambda one: one.__name__)


def make(info: inspect.Type, rng: random.Random, path: str = "") -> Any:
    """A random value of the type, within its constraints."""
    match info:
        case inspect.StructType():
            while True:
                arguments = {
                    field.name: make(field.type, rng, f"{path}.{field.name}")
                    for field in info.fields
                    if field.required or rng.random() < 0.7
                }
                try:
                    return info.cls(**arguments)
                except ValueError:  # Only its own check refuses it.
                    continue
        case inspect.UnionType():
            return make(rng.choice(info.types), rng, path)
        case inspect.NoneType():
            return None
        case inspect.BoolType():
            return rng.random() < 0.5
        case inspect.IntType():
            least = info.ge if info.ge is not None else -(2**63)
            most = info.le if info.le is not None else 2**63 - 1
            if info.lt is not None:
                most = info.lt - 1
            return rng.choice([least, most, rng.randint(least, most), max(least, min(most, 1))])
        case inspect.FloatType():
            least = info.ge if info.ge is not None else -1e300
            if info.gt is not None:
                least = math.nextafter(info.gt, math.inf)
            most = info.le if info.le is not None else 1e300
            if info.lt is not None:
                most = math.nextafter(info.lt, least)
            return rng.choice([least, rng.uniform(least, min(most, 1e6)), most])
        case inspect.StrType():
            return _text(info, rng)
        case inspect.LiteralType():
            return rng.choice(info.values)
        case inspect.TupleType():
            return tuple(make(item, rng, path) for item in info.item_types)
        case inspect.VarTupleType():
            count = rng.randint(info.min_length or 0, min(info.max_length or 4, 4))
            return tuple(make(info.item_type, rng, path) for _ in range(max(count, 0)))
        case inspect.DictType():
            count = rng.randint(0, min(info.max_length or 3, 3))
            return {
                make(info.key_type, rng, path): make(info.value_type, rng, path)
                for _ in range(count)
            }
        case inspect.BytesType():
            least = info.min_length or 0
            return rng.randbytes(max(least, min(info.max_length or 16, 16)))
        case _:
            raise AssertionError(f"{path}: teach this test to make a {info}")


def _text(info: inspect.StrType, rng: random.Random) -> str:
    if info.pattern and (digits := HEX_PATTERN.match(info.pattern)):
        return f"{rng.getrandbits(4 * int(digits[1])):0{digits[1]}x}"
    alphabet = "abcXYZ019" if info.pattern else 'aé漢\U0001f30a \n"\\{}\x00'
    least = max(info.min_length or 0, 1 if info.pattern else 0)
    if info.pattern and info.pattern.startswith("^[0-9]{1,"):
        return str(rng.randint(0, 9_999_999))
    most = min(info.max_length or 12, 12)
    text = "".join(rng.choice(alphabet) for _ in range(rng.randint(least, max(least, most))))
    return rng.choice("abcXYZ") + text[1:] if info.pattern else text


def instance(kind: type[msgspec.Struct], rng: random.Random) -> Any:
    made = make(inspect.type_info(kind), rng)
    if isinstance(made, Message):
        made = msgspec.structs.replace(made, v=1)
    return made


def test_there_are_structs_to_test() -> None:
    assert len(MESSAGES) > 30
    assert len(RECORDS) > 10


@every_struct
@settings(max_examples=25)
@given(rng=st.randoms(use_true_random=True))
def test_round_trip_and_a_foreign_reader(kind: type[msgspec.Struct], rng: random.Random) -> None:
    """Decoding gives what was encoded, and the plain msgpack package reads the same map."""
    made = instance(kind, rng)
    if isinstance(made, Record):
        value = codec.encode_record(made, epoch=7)
        assert codec.decode_record(value, type(made), "key") == (made, 7)
        assert msgpack.unpackb(value)["record"] == _plain(
            msgspec.to_builtins(made, builtin_types=[bytes])
        )
        return
    payload = codec.encode(made)
    assert codec.decode(payload, kind) == made
    assert msgpack.unpackb(payload) == _plain(msgspec.to_builtins(made, builtin_types=[bytes]))
    assert codec.decode(msgpack.packb(msgpack.unpackb(payload)), kind) == made
    assert codec.decode(codec.encode(made, json=True), kind, json=True) == made


def _plain(value: Any) -> Any:
    """Tuples are arrays on the wire, and lists to a foreign reader."""
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _flip(payload: bytearray, rng: random.Random) -> None:
    payload[rng.randrange(len(payload))] ^= 1 << rng.randrange(8)


def _cut(payload: bytearray, rng: random.Random) -> None:
    del payload[rng.randrange(len(payload)) :]


def _insert(payload: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(payload) + 1)
    payload[at:at] = rng.randbytes(rng.randint(1, 4))


def _claim(payload: bytearray, rng: random.Random) -> None:
    """A header that claims up to 4 GiB: str32, bin32, array32, map32, ext32."""
    at = rng.randrange(len(payload))
    payload[at : at + 5] = bytes([rng.choice([0xDB, 0xC6, 0xDD, 0xDF, 0xC9])]) + rng.randbytes(4)


def _nan(payload: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(payload))
    payload[at : at + 1] = rng.choice([b"\xcb\x7f\xf8" + bytes(6), b"\xca\x7f\x80\x00\x00"])


def _splice(payload: bytearray, rng: random.Random) -> None:
    at, length = rng.randrange(len(payload)), rng.randint(1, 16)
    payload[rng.randrange(len(payload)) :] = payload[at : at + length] * rng.randint(1, 3)


MUTATIONS: list[Callable[[bytearray, random.Random], None]] = [
    _flip, _cut, _insert, _claim, _nan, _splice
]  # fmt: skip


@pytest.mark.parametrize(
    ("seed", "rounds"),
    [(2017, 8_000), pytest.param(2019, 40_000, marks=pytest.mark.nightly)],
)
def test_mutated_messages_are_refused_or_valid(seed: int, rounds: int) -> None:
    """Thousands of mutations: a decoder raises DecodeRejected or returns a message that can be
    encoded again, and nothing else ever happens."""
    rng = random.Random(seed)
    union = Any
    for kind in MESSAGES:
        union = kind if union is Any else union | kind
    texts: list[str] = []
    accepted = 0
    for round_ in range(rounds):
        kind = MESSAGES[round_ % len(MESSAGES)]
        payload = bytearray(codec.encode(instance(kind, rng)))
        for _ in range(rng.randint(1, 3)):
            if payload:
                rng.choice(MUTATIONS)(payload, rng)
        try:
            message = codec.decode(bytes(payload), union if round_ % 2 else kind)
        except DecodeRejected as error:
            texts.append(str(error))
        else:
            assert codec.decode(codec.encode(message), type(message)) == message
            accepted += 1
    assert len(texts) > rounds // 2
    assert not [text for text in texts if "\n" in text or len(text) > 400], "one short line each"
    assert accepted > rounds // 100, "the mutations are too coarse to reach behind the parser"


def test_mutated_json_is_refused_or_valid() -> None:
    rng = random.Random(2018)
    refused = 0
    for round_ in range(4_000):
        kind = MESSAGES[round_ % len(MESSAGES)]
        payload = bytearray(codec.encode(instance(kind, rng), json=True))
        rng.choice([_flip, _cut, _insert, _splice])(payload, rng)
        try:
            codec.decode(bytes(payload), kind, json=True)
        except DecodeRejected:
            refused += 1
    assert refused > 2_000


def test_every_text_number_and_collection_has_a_maximum() -> None:
    """A message that passes the decoder cannot hold an unbounded list: cores may loop over it."""
    assert unbounded_fields() == []


def unbounded_fields() -> list[str]:
    """Fields of text, numbers, tuples or maps without a maximum, as `Struct.field`."""
    return [
        f"{kind.__name__}.{field.name}"
        for kind in STRUCTS
        for field in inspect.type_info(kind).fields
        if _unbounded(field.type)
    ]


def _unbounded(info: inspect.Type) -> bool:
    match info:
        case inspect.StrType():
            return info.max_length is None and info.pattern is None
        case inspect.BytesType():
            return info.max_length is None
        case inspect.IntType() | inspect.FloatType():
            high = info.le if info.lt is None else info.lt
            return high is None or (info.ge is None and info.gt is None)
        case inspect.UnionType():
            return any(_unbounded(one) for one in info.types)
        case inspect.TupleType():
            return any(_unbounded(one) for one in info.item_types)
        case inspect.VarTupleType() | inspect.ListType() | inspect.SetType():
            return info.max_length is None or _unbounded(info.item_type)
        case inspect.DictType():
            return (
                info.max_length is None or _unbounded(info.key_type) or _unbounded(info.value_type)
            )
        case _:
            return False
