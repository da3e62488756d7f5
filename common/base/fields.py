"""The fields of a struct, told to people: what each is for, and what its value has to be.

The texts are the structs' own: a field's docstring stands below it in the source, its bounds are in
its type.
"""

import ast
import inspect
import textwrap
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import msgspec
from msgspec import inspect as types

from slackwater.schemas.base import AN_ID, ID_PATTERN


@cache
def docs(kind: type[msgspec.Struct]) -> Mapping[str, str]:
    """Return each field's docstring by its name; a field without one is left out."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if issubclass(base, msgspec.Struct) and base is not msgspec.Struct:
            found |= _docs_of(base)
    return found


def _docs_of(kind: type[msgspec.Struct]) -> dict[str, str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    except (OSError, TypeError):  # Made at run time, or installed without its source.
        return {}
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for field, after in zip(tree.body, tree.body[1:], strict=False):
        match field, after:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                found[name] = " ".join(text.split())
    return found


def fields_of(kind: type[msgspec.Struct]) -> dict[str, types.Field]:
    """Return the struct's fields by the names that a file has."""
    info = types.type_info(kind)
    assert isinstance(info, types.StructType)
    return {field.encode_name: field for field in info.fields}


def type_at(kind: type[msgspec.Struct], path: Sequence[str]) -> types.Type | None:
    """Return the type of the value at `path` (keys, and positions of lists); None: no such path."""
    found: types.Type = types.type_info(kind)
    for part in path:
        match found:
            case types.StructType(fields=fields):
                inner = next((f.type for f in fields if f.encode_name == part), None)
            case types.DictType(value_type=inner) | types.ListType(item_type=inner):
                pass
            case types.VarTupleType(item_type=inner):
                pass
            case _:
                inner = None
        if inner is None:
            return None
        found = inner
    return found


def wanted(type: types.Type) -> str:
    """Describe a valid value, as it reads after the word `give`."""
    match type:
        case types.BoolType():
            return "true or false"
        case types.IntType():
            return f"a whole number{_range(type)}"
        case types.FloatType():
            return f"a number{_range(type)}"
        case types.LiteralType(values=values):
            return f"one of {', '.join(repr(value) for value in values)}"
        case types.StrType(pattern=pattern, max_length=longest):
            return _text(pattern, longest)
        case types.StructType(fields=fields):
            return f"a table of {', '.join(field.encode_name for field in fields)}"
        case types.DictType():
            return "a table"
        case types.ListType(item_type=item) | types.VarTupleType(item_type=item):
            return f"a list, of which each is {wanted(item)}"
        case types.UnionType(types=several):
            return " or ".join(wanted(each) for each in several)
        case types.NoneType():
            return "nothing"
        case _:
            return "another value"


def _text(pattern: str | None, longest: int | None) -> str:
    if pattern == ID_PATTERN:
        return AN_ID
    text = "a text" if pattern is None else f"a text that matches {pattern}"
    return text if longest is None else f"{text} of at most {longest:,} characters"


def _range(type: types.IntType | types.FloatType) -> str:
    least, most = type.ge, type.le
    if least is not None and most is not None:
        return f" from {figure(least)} to {figure(most)}"
    bounds = {
        "of at least": least, "above": type.gt, "of at most": most, "below": type.lt,
    }  # fmt: skip
    said = [f"{word} {figure(bound)}" for word, bound in bounds.items() if bound is not None]
    return f" {' and '.join(said)}" if said else ""


def figure(number: float) -> str:
    """Write a bound as people do."""
    return f"{number:,d}" if isinstance(number, int) else f"{number:,g}"


def shown(value: Any) -> str:
    """Show a file's value in an error, cut to a bounded length."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
