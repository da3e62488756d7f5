"""Exponentially weighted moving averages: of a lender's memory in use and of a span's activity.

Gu, dissertation, 2.4.1 and 2.5.1: current = weight * measured + (1 - weight) * old, once a second.
The paper begins at zero; memory in use begins with the first sample here, because an average that
climbs from zero would lend memory that is in use.
"""


class Ewma:
    """`value` is None until the first sample, which it then is."""

    __slots__ = ("value", "weight")

    def __init__(self, weight: float) -> None:
        assert 0.0 < weight <= 1.0, weight
        self.weight = weight
        self.value: float | None = None

    def add(self, measured: float) -> float:
        old = self.value
        new = measured if old is None else self.weight * measured + (1.0 - self.weight) * old
        self.value = new
        return new
