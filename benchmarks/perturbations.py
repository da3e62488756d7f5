"""Measure the rework of a perturbation beside the bound of theorem 5.3.1 (SCAR: Qiao 2021, 5.5.2).

    python benchmarks/perturbations.py [--trials 200]

Softmax regression on digits by the whole gradient, with a ridge, so that the optimum is known. A
trial is perturbed once, after iteration 50 (figures 5.5, 5.6): by a random Gaussian, straight away
from the optimum, or by a random part of the rows that are set back to how they began. It has
converged where it is as near to the optimum as the undisturbed run after 100 iterations. c is the
slowest contraction of any iteration of any trial.

The theorem bounds the iterations in all: by log(|w0 - w*| / e) / log(1 / c), and eq. 5.6 for the
perturbation. The figures draw eq. 5.6 over the iterations that a trial takes more than the
undisturbed run does. That one may take fewer than its own bound, so that what is drawn can be
exceeded without a breach of the theorem; how often and by how much is said.
"""

import argparse
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
from figures import Figure, Row, show, this_command, write_json
from numpy.typing import NDArray
from sklearn.datasets import load_digits

from slackwater.common.domains.models.rework import Perturbation, rework_bound

AT, CONVERGED = 50, 100
RIDGE, RATE = 0.02, 0.9
OPTIMUM_STEPS, MOST = 5000, 2000
Array = NDArray[np.float64]
KINDS: Final = ("random", "away from the optimum", "rows set back")


class Softmax:
    def __init__(self) -> None:
        digits = load_digits()
        self.x = np.c_[digits.data / 16.0, np.ones(len(digits.data))]
        self.y = np.eye(10)[digits.target]
        self.start = np.random.default_rng(0).normal(size=(65, 10))

    def step(self, w: Array) -> Array:
        z = self.x @ w
        p = np.exp(z - z.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        gradient = self.x.T @ (p - self.y) / len(self.x) + RIDGE * w
        return np.asarray(w - RATE * gradient)


class Trials:
    def __init__(self, model: Softmax) -> None:
        self.model, self.optimum = model, model.start
        for _ in range(OPTIMUM_STEPS):
            self.optimum = model.step(self.optimum)
        self.far = self.distance(model.start)
        self.slowest = 0.0
        self.near = 0.0
        self.near = self.distance(self.states(lambda w: w)[-1])

    def distance(self, w: Array) -> float:
        return float(np.linalg.norm(w - self.optimum))

    def states(self, disturbed: Callable[[Array], Array]) -> list[Array]:
        """Train until it has converged, disturbed once, and return each state."""
        found = [self.model.start]
        while len(found) <= MOST:
            before = found[-1] if len(found) != AT + 1 else disturbed(found[-1])
            found.append(self.model.step(before))
            self.slowest = max(self.slowest, self.distance(found[-1]) / self.distance(before))
            if self.near and self.distance(found[-1]) <= self.near:
                break
            if not self.near and len(found) > CONVERGED:
                break
        return found

    def iterations(self, disturbed: Callable[[Array], Array]) -> float:
        """Return after how many iterations it has converged, the last of them in part."""
        states = self.states(disturbed)
        before, after = (math.log(self.distance(w)) for w in states[-2:])
        part = (before - math.log(self.near)) / (before - after)
        return len(states) - 2 + min(1.0, part)


def disturbance(kind: str, trials: Trials, rng: np.random.Generator) -> Callable[[Array], Array]:
    norm = 10 ** rng.uniform(-1.0, 0.7)

    def disturbed(w: Array) -> Array:
        if kind == "random":
            direction = rng.normal(size=w.shape)
        elif kind == "away from the optimum":
            direction = w - trials.optimum
        else:
            lost = rng.random(len(w)) < rng.uniform(0.05, 0.95)
            return np.where(lost[:, None], trials.model.start, w)
        return np.asarray(w + direction * norm / np.linalg.norm(direction))

    return disturbed


def measure(count: int) -> list[Row]:
    trials = Trials(Softmax())
    rng = np.random.default_rng(1)
    took: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for kind in KINDS:
        for _ in range(count):
            norms: list[float] = []
            apply = disturbance(kind, trials, rng)

            def noted(
                w: Array, apply: Callable[[Array], Array] = apply, norms: list[float] = norms
            ) -> Array:
                changed = apply(w)
                norms.append(float(np.linalg.norm(changed - w)))
                return changed

            took[kind].append((trials.iterations(noted), norms[0]))
    c = trials.slowest
    alone = math.log(trials.far / trials.near) / -math.log(c)
    rows: list[Row] = []
    for kind, found in took.items():
        bounds = [rework_bound(c, trials.far, [Perturbation(AT, norm)]) for _, norm in found]
        totals = [n / (alone + bound) for (n, _), bound in zip(found, bounds, strict=True)]
        drawn = [(n - CONVERGED) / bound for (n, _), bound in zip(found, bounds, strict=True)]
        above = sum(each > 1.0 for each in drawn) / count
        rows += [
            Figure(f"{kind}: the most iterations in all, of the theorem's (c = {c:.4f})",
                   max(totals), 1.0, "times", "theorem 5.3.1", 1.0, lower_is_better=True),
            Figure(f"{kind}: rework, median (over it in {above:.0%}, at most {max(drawn):.2f})",
                   statistics.median(drawn), 1.0, "times", "eq. 5.6"),
        ]  # fmt: skip
    rows.append(Figure("the undisturbed run, of its own bound", CONVERGED, alone, "iterations",
                       "log(d / e) / log(1 / c)"))  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=200, help="of each kind")
    parser.add_argument("--json", type=Path)
    options: Any = parser.parse_args()
    rows = measure(options.trials)
    show("perturbations", rows)
    if options.json is not None:
        write_json(options.json, this_command(), rows)


if __name__ == "__main__":
    main()
