"""State machines by a table: which state may follow which, and the story of a thing that broke it.

A thing (a slab, a span's member) moves by its table alone. An impossible transition is a mistake in
the program that must not go on: it is raised with the thing's last transitions, so that a report
tells how it came about (the idea is dask's: `InvalidTransition` with its story).
"""

from collections import deque
from collections.abc import Mapping, Set
from typing import Final, TypeVar

STORY_MAX: Final = 16
"""Transitions of one thing that are remembered."""

State = TypeVar("State", bound=str)


class InvalidTransition(RuntimeError):
    """A state was to follow one that it cannot follow: a defect of the program."""

    def __init__(self, thing: str, old: str, new: str, why: str, story: "Story") -> None:
        super().__init__(f"{thing}: {old} -> {new} ({why}) is impossible; before: {story}")
        self.thing, self.old, self.new, self.why = thing, old, new, why


class Story:
    """The last transitions of one thing, the oldest first. Bounded."""

    def __init__(self) -> None:
        self._steps: deque[tuple[str, str]] = deque(maxlen=STORY_MAX)

    def __str__(self) -> str:
        return ", ".join(f"{state} ({why})" for state, why in self._steps) or "nothing"

    def begin(self, state: str, why: str) -> None:
        self._steps.append((state, why))

    def move(
        self, thing: str, old: State, new: State, why: str, table: Mapping[State, Set[State]]
    ) -> None:
        """Note a transition. `table`: by state, those that may follow it. Raises InvalidTransition
        when it has no such one."""
        if new not in table[old]:
            raise InvalidTransition(thing, old, new, why, self)
        self._steps.append((new, why))
