"""Single changes of a module's source, each of which its tests should notice."""

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

COMPARED: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
RECKONED: Final[dict[type[ast.operator], type[ast.operator]]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}  # fmt: skip
TOLD: Final = ("_log.", "failpoint(", "raise ")
"""Statements that only tell somebody, or mark a place for tests."""


@dataclass(frozen=True, slots=True)
class Change:
    """`before` becomes `after` in a function of a module: a mutant."""

    module: str
    function: str
    line: int
    kind: str
    before: str
    after: str
    start: int
    """The first byte of what is replaced."""
    end: int

    @property
    def name(self) -> str:
        """Name it by what it is, so that lines may move: module, function, kind, before."""
        return f"{self.module}:{self.function}:{self.kind}:{' '.join(self.before.split())[:80]}"

    def applied(self, source: str) -> str:
        """Return the changed source."""
        raw = source.encode()
        return (raw[: self.start] + self.after.encode() + raw[self.end :]).decode()


def changes(module: str, source: str) -> list[Change]:
    """List the changes that can be made in bodies of functions, in the order of their places."""
    starts = [0]
    for line in source.encode().split(b"\n"):
        starts.append(starts[-1] + len(line) + 1)
    found: dict[tuple[str, int, int], Change] = {}
    for name, node in _functions(ast.parse(source)):
        for statement in node.body:
            for each in _walked(statement):
                for kind, place, new in _of(each):
                    text = ast.get_source_segment(source, place) or ""
                    if text.startswith(TOLD):
                        continue
                    start = starts[place.lineno - 1] + place.col_offset
                    end = starts[place.end_lineno - 1] + place.end_col_offset
                    after = ast.unparse(ast.fix_missing_locations(new))
                    if isinstance(new, ast.Compare | ast.BoolOp | ast.BinOp):
                        after = f"({after})"
                    found.setdefault(
                        (kind, start, end),
                        Change(module, name, place.lineno, kind, text, after, start, end),
                    )
    return sorted(found.values(), key=lambda change: (change.start, change.kind))


def _walked(node: ast.AST) -> Iterator[ast.AST]:
    """Yield it and what is in it, but for annotations: they do nothing."""
    yield node
    for name, value in ast.iter_fields(node):
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, ast.AST) and name not in ("annotation", "returns"):
                yield from _walked(each)


def _functions(tree: ast.Module) -> Iterator[tuple[str, Any]]:
    owners = [each for each in ast.walk(tree) if isinstance(each, ast.Module | ast.ClassDef)]
    for owner in owners:
        for node in owner.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                prefix = f"{owner.name}." if isinstance(owner, ast.ClassDef) else ""
                yield prefix + node.name, node


def _of(node: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield (kind, what is replaced, by what)."""

    def changed(**fields: Any) -> Any:
        new = copy.deepcopy(node)
        for name, value in fields.items():
            setattr(new, name, value)
        return new

    match node:
        case ast.Compare(ops=[op]) if type(op) in COMPARED:
            yield "compare", node, changed(ops=[COMPARED[type(op)]()])
        case ast.BoolOp(op=ast.Or()):
            yield "or", node, changed(op=ast.And())
        case ast.BoolOp():
            yield "and", node, changed(op=ast.Or())
        case ast.BinOp(op=op) if type(op) in RECKONED and not isinstance(node.left, ast.Constant):
            yield "reckon", node, changed(op=RECKONED[type(op)]())
        case ast.UnaryOp(op=ast.Not()):
            yield "not", node, node.operand
        case ast.If():
            yield "always", node.test, ast.Constant(True)
            yield "never", node.test, ast.Constant(False)
        case ast.Constant(value=bool(value)):
            yield "flip", node, ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield "number", node, ast.Constant(value + 1)
        case ast.Return(value=value) if value is not None and not _is_false(value):
            yield "return", node, ast.Return(ast.Constant(None))
        case ast.Expr(value=ast.Call()):
            yield "call", node, ast.Pass()
        case ast.AugAssign(op=ast.Add()):
            yield "add", node, changed(op=ast.Sub())
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_]):
            yield "assign", node, ast.Pass()


def _is_false(value: ast.expr) -> bool:
    """Say whether None in its place is as false: callers ask no more of it."""
    return isinstance(value, ast.Constant) and not value.value
