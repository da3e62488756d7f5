"""Things by name: ours from a table, imported when asked for, and those that others installed.

A third party's package names its class in an entry point of the registry's group; nothing else is
needed for it to be found wherever ours are.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import Generic, TypeVar

from slackwater.common.base.errors import ConfigRejected

T = TypeVar("T")


class Registry(Generic[T]):
    """Factories of `T` by name."""

    def __init__(self, noun: str, built_in: Mapping[str, str], group: str = "") -> None:
        """`built_in`: name -> "module:attribute"; `group`: of entry points, empty: ours alone."""
        self.noun, self.built_in, self.group = noun, built_in, group
        self._added: dict[str, Callable[..., T]] = {}

    def add(self, name: str, factory: Callable[..., T]) -> None:
        """Make a factory known in this process."""
        self._added[name] = factory

    def names(self) -> list[str]:
        """List every name, sorted."""
        points = entry_points(group=self.group) if self.group else ()
        return sorted({*self.built_in, *self._added, *(point.name for point in points)})

    def find(self, name: str) -> Callable[..., T]:
        """The factory of that name. Raises ConfigRejected with the names that there are."""
        if name in self._added:
            return self._added[name]
        found: Callable[..., T]
        if name in self.built_in:
            module, _, attribute = self.built_in[name].partition(":")
            found = getattr(import_module(module), attribute)
            return found
        for point in entry_points(group=self.group, name=name) if self.group else ():
            found = point.load()
            return found
        raise ConfigRejected(
            f"there is no {self.noun} {name!r}; choose one of {', '.join(self.names())}"
        )
