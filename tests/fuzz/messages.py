"""Messages made and mutated by their structure, from one seed: boundary values in every field, ids
that mean something to the services, and sometimes what only a decoder can refuse."""

from copy import deepcopy
from random import Random
from typing import Any

import msgspec

from slackwater.common.base import codec
from slackwater.common.base.errors import DecodeRejected
from slackwater.common.domains.slots.layout import plan_buckets
from slackwater.schemas.placement import HostBuckets
from slackwater.schemas.tensors import TensorSpec

inspect = msgspec.inspect
IDS = ["a1", "a2", "a3", "c0", "c1", "m0", "s1", "w1", "d1", "j1", "j2", "j3", "j4", "z" * 63]
SLABS = [f"{number:012x}" for number in range(4)]
INTS = [0, 1, 2, 3, 5, 63, 64, 255, 1000, 4096, 19_999, 2**31 - 1, 2**32, 2**42, 2**53 - 1, 2**53]
FLOATS = [0.0, 1e-300, 1e-9, 0.001, 0.05, 0.5, 0.999, 1.0, 60.0, 1e6, 1e10, 1e15, -1.0, -1e15]
TEXTS = [
    "",
    " ",
    "a.b",
    "*",
    ">",
    "é漢\U0001f30a",
    "\x00",
    "\n",
    "a\n",
    "x" * 64,
    "-1",
    "%s",
    "_epoch",
]
ODD: list[Any] = [
    None, True, -1, 0, 1, 2**53 + 1, 2**63 - 1, 2**64 - 1, -(2**63), 1e308, -1e308, 5e-324, "",
    "x" * 4096, "x" * 5000, "a\n", "a.b", "_epoch", b"\x00\xff", [], {}, [[]], {"": ""}, 0.5,
]  # fmt: skip
LIKELY = 0.75
"""How often a value is a small one, so that messages meet what former ones left behind."""


def message(kind: Any, rng: Random) -> Any:
    """A message of one of the types `kind` that a decoder lets pass; half of them are mutated."""
    while True:
        whole = made(kind, rng)
        if isinstance(whole, HostBuckets) and rng.random() < LIKELY:
            whole = _hostable(whole, rng)
        if rng.random() < 0.5:
            return whole
        tree = msgspec.to_builtins(whole, builtin_types=[bytes])
        for _ in range(rng.choice((1, 1, 2, 3))):
            _mutate(tree, rng)
        try:
            return codec.decode(msgspec.msgpack.encode(tree), kind)
        except (DecodeRejected, OverflowError):
            continue  # The shell refuses it too: it does not reach the core.


def made(kind: Any, rng: Random) -> Any:
    """One whose fields are within the bounds of their types."""
    return _made(inspect.type_info(kind), rng)


def _hostable(made: HostBuckets, rng: Random) -> HostBuckets:
    """With buckets that are those of its tensors; else nothing is ever hosted."""
    tensors = tuple(TensorSpec(name=f"t{n}", shape=(rng.choice((1, 8, 512)), 64)) for n in (1, 2))
    buckets = plan_buckets(tensors, rng.choice((1024, 1 << 20)))
    epochs = tuple(rng.choice((0, 1, 2, 3)) for _ in buckets)
    return msgspec.structs.replace(made, tensors=tensors, buckets=buckets, at_epochs=epochs)


def _made(info: inspect.Type, rng: Random) -> Any:
    match info:
        case inspect.StructType():
            while True:
                given = [f for f in info.fields if f.required or rng.random() < 0.6]
                given = [f for f in given if f.required or f.name not in ("v", "epoch")]
                fields = {f.name: _made(f.type, rng) for f in given}
                try:
                    return info.cls(**fields)
                except ValueError:  # Its own check refused it: make another one.
                    continue
        case inspect.UnionType():
            return _made(rng.choice(info.types), rng)
        case inspect.NoneType():
            return None
        case inspect.BoolType():
            return rng.random() < 0.5
        case inspect.IntType():
            return _number(INTS, info.ge, info.le if info.lt is None else info.lt - 1, rng)
        case inspect.FloatType():
            high = info.le if info.lt is None else info.lt - 2**-53
            low = info.ge if info.gt is None else info.gt + 2**-53
            return float(_number(FLOATS, low, high, rng))
        case inspect.StrType():
            return _text(info, rng)
        case inspect.LiteralType():
            return rng.choice(info.values)
        case inspect.TupleType():
            return tuple(_made(item, rng) for item in info.item_types)
        case inspect.VarTupleType():
            return _several(info, rng)
        case inspect.DictType():
            count = min(rng.choice((0, 1, 2)), info.max_length or 2)
            return {_made(info.key_type, rng): _made(info.value_type, rng) for _ in range(count)}
        case inspect.BytesType():
            return rng.randbytes(min(info.max_length or 16, rng.choice((0, 16, 64))))
        case _:
            raise AssertionError(f"teach this to make a {info}")


def _number(boundaries: list[Any], low: Any, high: Any, rng: Random) -> Any:
    low, high = (-1e15 if low is None else low), (1e15 if high is None else high)
    found = [each for each in boundaries if low <= each <= high] or [low]
    return rng.choice(found[:6]) if rng.random() < LIKELY else rng.choice([low, high, *found])


def _text(info: inspect.StrType, rng: Random) -> str:
    if info.pattern is not None and "0-9a-f]{12}" in info.pattern:
        return rng.choice(SLABS)
    if info.pattern is not None and "0-9a-f]{32}" in info.pattern:
        return rng.randbytes(16).hex()
    if info.pattern is not None and "0-9a-f]{64}" in info.pattern:
        return rng.choice(["", "c0de" * 16])
    if info.pattern is not None and info.pattern.startswith("^[0-9]{1,"):
        return str(rng.randint(0, 9_999_999))
    if info.pattern is not None:
        return rng.choice(IDS)
    text = rng.choice(IDS + TEXTS)
    if rng.random() < 0.05:
        text = rng.choice("aé") * (info.max_length or 64)
    text = text[: info.max_length]
    return text if len(text) >= (info.min_length or 0) else "x"


def _several(info: inspect.VarTupleType, rng: Random) -> tuple[Any, ...]:
    count = rng.choice((0, 1, 1, 1, 2, 3))
    count = max(info.min_length or 0, min(count, info.max_length or count))
    items = [_made(info.item_type, rng) for _ in range(count)]
    if len(items) > 1 and rng.random() < 0.2:
        items[-1] = items[0]
    return tuple(items)


def _mutate(tree: Any, rng: Random) -> None:
    """Change one field somewhere in the tree: another value, twice, or none at all."""
    paths = [path for path in _paths(tree) if path]
    if not paths:
        return
    *way, last = rng.choice(paths)
    for step in way:
        tree = tree[step]
    what = rng.random()
    if what < 0.6:
        tree[last] = deepcopy(rng.choice(ODD))
    elif what < 0.75:
        del tree[last]
    elif isinstance(tree, list):
        tree.append(deepcopy(tree[last]))
    elif type(tree[last]) in (int, float):
        tree[last] = rng.choice((tree[last] + 1, tree[last] - 1, -tree[last], tree[last] * 2**32))


def _paths(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path]
    if isinstance(tree, dict):
        for key in tree:
            found += _paths(tree[key], (*path, key))
    elif isinstance(tree, list):
        for index in range(len(tree)):
            found += _paths(tree[index], (*path, index))
    return found
