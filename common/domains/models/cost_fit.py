"""Cruise's cost parameters, fitted to what was measured while a program ran (Lee 2020, 3.3.1).

A mini-batch of a worker takes c B seconds to compute, and to fetch the model and push to it

    max(w / (N - w), 1) M / b + server_s (N - w)

(eq. 3.5, and a cost of each server beyond it). c comes from the times of computing alone; 1 / b and
server_s are those from 0 on with the least sum of squared relative errors. In one configuration the
two cannot be told apart: then server_s is 0. Where links do not count, b is as good as endless.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from slackwater.common.base.errors import Rejected
from slackwater.common.domains.models.cost import Machine

_NEXT_TO_0: Final = 1e-9


class Measured(msgspec.Struct, frozen=True):
    """Means over mini-batches in one configuration of machines alike."""

    workers: int
    servers: int
    instances: float
    """Instances in a mini-batch."""
    compute_s: float
    transfer_s: float


class Fit(msgspec.Struct, frozen=True):
    machine: Machine
    server_s: float
    residuals: tuple[float, ...]
    """By measurement: the foretold time of a mini-batch over the measured one, less 1."""

    @property
    def worst(self) -> float:
        return max(map(abs, self.residuals))

    def batch_s(self, model_bytes: float, workers: int, servers: int, instances: float) -> float:
        """Return the seconds of a mini-batch of so many instances."""
        crowded = max(1.0, workers / servers) * model_bytes / self.machine.bytes_per_s
        return instances * self.machine.instance_s + crowded + self.server_s * servers


def fitted(model_bytes: float, measured: Sequence[Measured]) -> Fit:
    """Raises Rejected: there are no measurements, or no time in them."""
    if not measured or any(
        m.instances <= 0 or m.transfer_s <= 0 or m.compute_s < 0 for m in measured
    ):
        raise Rejected(
            f"{len(measured)} measurements; give at least one, each of mini-batches with instances "
            "whose transfers took some time"
        )
    instance_s = sum(m.compute_s for m in measured) / sum(m.instances for m in measured)
    crowded = [max(1.0, m.workers / m.servers) * model_bytes / m.transfer_s for m in measured]
    servers = [m.servers / m.transfer_s for m in measured]
    byte_s, server_s = _two_from_zero(crowded, servers)
    fit = Fit(Machine(instance_s, 1.0 / byte_s), server_s, ())
    residuals = (
        fit.batch_s(model_bytes, m.workers, m.servers, m.instances)
        / (m.compute_s + m.transfer_s) - 1.0
        for m in measured
    )  # fmt: skip
    return msgspec.structs.replace(fit, residuals=tuple(residuals))


def _two_from_zero(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """Return u > 0 and v >= 0 with the least sum of (u first + v second - 1)^2; u next to 0 where
    it would be 0."""
    aa = sum(a * a for a in first)
    bb = sum(b * b for b in second)
    ab = sum(a * b for a, b in zip(first, second, strict=True))
    a1, b1 = sum(first), sum(second)
    determinant = aa * bb - ab * ab
    if determinant > 1e-9 * aa * bb:
        u, v = (a1 * bb - b1 * ab) / determinant, (b1 * aa - a1 * ab) / determinant
        if u > 0.0 and v >= 0.0:
            return u, v
        if u <= 0.0:
            return _NEXT_TO_0 * a1 / aa, b1 / bb
    return a1 / aa, 0.0
