"""Faults of a network in memory: what is lost, repeated, delayed, and who cannot reach whom."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol


class Faults(Protocol):
    def copies(self, sender: str, receiver: str, subject: str) -> Sequence[float]:
        """The delay of each copy that arrives: () loses the message, (0.0,) is a good network."""
        ...


@dataclass
class SeededFaults:
    """Random loss, repetition and delay, and partitions between named clients."""

    rng: random.Random
    drop: float = 0.0
    duplicate: float = 0.0
    delay_s_max: float = 0.0
    """Every copy is delayed by up to this: messages overtake one another."""
    _cut: set[frozenset[str]] = field(default_factory=set)
    _isolated: set[str] = field(default_factory=set)

    def copies(self, sender: str, receiver: str, subject: str) -> Sequence[float]:
        if sender != receiver and (
            frozenset((sender, receiver)) in self._cut
            or sender in self._isolated
            or receiver in self._isolated
        ):
            return ()
        if self.drop and self.rng.random() < self.drop:
            return ()
        count = 2 if self.duplicate and self.rng.random() < self.duplicate else 1
        return [self.rng.uniform(0.0, self.delay_s_max) for _ in range(count)]

    def cut(self, one: str, other: str) -> None:
        self._cut.add(frozenset((one, other)))

    def isolate(self, name: str) -> None:
        self._isolated.add(name)

    def heal(self) -> None:
        self._cut.clear()
        self._isolated.clear()
