"""An elastic program: its tables, its executors and its driver (Qiao 2021, section 4.3).

    class Mlr(App):
        executors = 16
        tables = {"w": Table(rows=65, width=10)}
        driver = Ssp(iterations=100, staleness=2)

        class Executor(elastic.Executor):
            def load(self, part): ...
            def run(self, ctx, task): ...

The program says how its data are divided, into more executors than it has hosts; which hosts there
are, and where an executor runs, is not its business.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np

from slackwater.common.base.errors import Rejected
from slackwater.common.domains.slots.rules import Floats
from slackwater.elastic.drivers import Driver
from slackwater.elastic.rules import ADD, TableRule
from slackwater.schemas.elastic import EXECUTORS_MAX

EXACT_MAX: Final = 2**24
"""Whole numbers up to this one are exact in a table, which is of float32."""
_KINDS: Final = ("float32", "int32")


@dataclass(frozen=True)
class Table:
    """`rows` x `width` numbers that all executors read and add to.

    `init`: an array of that shape, or a function that returns one; zeros otherwise. `dtype`:
    float32, or int32 for counts, which are exact up to 2^24 (a larger one is refused). `sparse`: a
    task touches few of many rows; then these alone are read and written. `rule`: what an update
    does to it.
    """

    rows: int
    width: int
    init: Any = None
    dtype: str = "float32"
    sparse: bool = False
    rule: TableRule = ADD

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.width

    def first_values(self, name: str) -> Floats:
        """Return the values that the table begins with. Raises Rejected."""
        if self.init is None:
            return np.zeros(self.shape, np.float32)
        given = np.asarray(self.init() if callable(self.init) else self.init)
        if given.shape != self.shape:
            raise Rejected(
                f"table {name}: init has shape {given.shape}, the table {self.shape}; give as many "
                "rows and columns"
            )
        values = given.astype(np.float32)
        if not np.isfinite(values).all():
            raise Rejected(f"table {name}: its initial values are not all finite")
        if self.dtype == "int32" and (values != np.rint(values)).any():
            raise Rejected(f"table {name}: its numbers are whole, its initial values are not")
        self.rule.check_first(f"table {name}", values)
        return values


class Executor(ABC):
    """A part of the program's data, and what is computed of it. One of them runs one task at a
    time, wherever it is."""

    number = 0
    """Its number, from 0 on; set before `load`."""

    def load(self, part: int) -> None:  # noqa: B027
        """Read part `part` of the data: at the begin, and again wherever it goes on."""

    @abstractmethod
    def run(self, ctx: Any, task: Any) -> Any:
        """Compute a micro-task: read tables by `ctx.get`, add to them by `ctx.update`. Return what
        the driver is to learn of it: numbers, text, arrays."""

    def save(self) -> Any:
        """Return the state that it has beside its data, as numbers, text and arrays in tuples,
        lists and maps; None: it has none. It goes along when it moves, and is kept with every batch
        of updates."""
        return None

    def restore(self, state: Any) -> None:
        """Take up the state that `save` returned, after `load`."""
        raise Rejected("save() returned something: say in restore() what becomes of it")


_Executor = Executor
"""Its name outside of App."""


class App:
    """An elastic program. Its Executor is made once for each part, without arguments; a nested
    class reaches what the program knows by `self.app`."""

    executors: int = 1
    """Parts of the data: several for each host that it may ever have."""
    tables: Mapping[str, Table] = {}
    driver: Driver
    Executor: ClassVar[type[_Executor]]

    def executor(self, number: int) -> _Executor:
        """Make the executor of a part, without its data."""
        made = self.Executor()
        made.number = number
        made.app = self  # type: ignore[attr-defined]
        return made

    def finish(self, tables: dict[str, Any], result: Any) -> Any:
        """Called once in rank 0, when all is over: `tables` as they are, [rows, width] each, and
        what the driver ended with. Return what the job's record is to keep, and `launch` returns,
        numbers and text: by default the driver's result."""
        return result


def checked(app: App) -> App:
    """Return the program if it can be run. Raises Rejected, which names the field."""
    kind = type(app).__name__
    if not isinstance(app, App):
        raise Rejected(f"launch() takes an App, this is a {kind}: derive it from slackwater's")
    if type(app.executors) is not int or not 1 <= app.executors <= EXECUTORS_MAX:
        raise Rejected(
            f"{kind}.executors is {app.executors!r}; give a whole number from 1 to {EXECUTORS_MAX}"
        )
    if not app.tables:
        raise Rejected(f"{kind}.tables is empty; give at least one Table")
    for name, table in app.tables.items():
        _check_table(f"{kind}.tables[{name!r}]", name, table)
    if not isinstance(getattr(app, "driver", None), Driver):
        raise Rejected(f"{kind}.driver is not a Driver; give Ssp, Bsp, Asp, or one of your own")
    executor = getattr(app, "Executor", None)
    if not isinstance(executor, type) or not issubclass(executor, _Executor):
        raise Rejected(f"{kind}.Executor is not a class of Executors; derive it from slackwater's")
    if getattr(executor, "__abstractmethods__", None):
        raise Rejected(f"{kind}.Executor has no run(); say in it what a task computes")
    return app


def _check_table(at: str, name: object, table: object) -> None:
    if not isinstance(name, str) or not name:
        raise Rejected(f"{at}: a table's name is a text that is not empty")
    if not isinstance(table, Table):
        raise Rejected(f"{at} is a {type(table).__name__}, not a Table")
    for field in ("rows", "width"):
        extent = getattr(table, field)
        if not isinstance(extent, int) or extent < 1:
            raise Rejected(f"{at}.{field} is {extent!r}; give a whole number of at least 1")
    if not isinstance(table.sparse, bool):
        raise Rejected(f"{at}.sparse is {table.sparse!r}; give True or False")
    if table.dtype not in _KINDS:
        raise Rejected(f"{at}.dtype is {table.dtype!r}; choose {' or '.join(_KINDS)}")
    _check_rule(at, table)


def _check_rule(at: str, table: Table) -> None:
    rule = table.rule
    if not isinstance(rule, TableRule):
        raise Rejected(
            f"{at}.rule is {rule!r}; give Add(), NonNegative(), SoftThreshold(by), Decay(share) or "
            "AdaGrad(rate)"
        )
    rule.check(f"{at}.rule")
    if table.dtype == "int32" and not rule.of_counts:
        raise Rejected(f"{at}: {rule} makes fractions of counts; give it dtype float32")
    if table.sparse and rule.of_all:
        raise Rejected(f"{at}: {rule} changes all rows with each update; let it not be sparse")


def described(app: App) -> str:
    """Say in a line what the program is: hosts of one run must all say the same."""
    tables = ", ".join(
        f"{name} {table.rows} x {table.width} {table.dtype}{' by rows' * table.sparse}"
        f"{f' {table.rule}' * (table.rule != ADD)}"
        for name, table in app.tables.items()
    )
    return f"{type(app).__name__}: {app.executors} executors; tables {tables}; {app.driver}"
