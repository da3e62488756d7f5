"""Measure what adapting costs a training program: fits, the choice of a batch, and waiting.

A job of 64 configurations, 2 % noise in their times, is fitted anew and from the last fit (CPU time
of this process; in a program a child of its own does it, by one thread as here). Blocked is the
training thread in the two calls that a fit needs of it: handing over the observations, and taking
the answer, which re-tunes. An iteration that only looks for an answer is told beside them.

    python benchmarks/adaptive.py [--rounds 40]

Goals (thesis, section 3.5.2: .2 s a fit, .4 ms a choice): a fit's median at most 50 ms of CPU, the
worst .4 s; a choice at most 1 ms; the thread is blocked for at most 1 ms.
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from random import Random
from typing import Final

from figures import Figure, Row, show, this_command, write_json

from slackwater.agent.fit_process import FitProcess
from slackwater.common.domains.models.adaptive_batch import AdaptiveBatch, Wanted
from slackwater.common.domains.models.fitting import Observation, fit
from slackwater.common.domains.models.goodput import BatchLimits
from slackwater.common.domains.models.throughput import ThroughputParams
from slackwater.common.native import blas_threads

THETA: Final = ThroughputParams(0.03, 0.0004, 0.01, 0.001, 0.03, 0.002, 1.8)
CONFIGURATIONS: Final = 64


def observed(rng: Random) -> tuple[Observation, ...]:
    found = []
    for number in range(CONFIGURATIONS):
        gpus = rng.choice((1, 2, 3, 4, 8))
        nodes, steps = min(gpus, rng.choice((1, 2))), number % 3
        per_gpu = 8 + 2 * number
        true_s = float(THETA.iteration_s(nodes, gpus, per_gpu, steps))
        found.append(Observation(nodes, gpus, per_gpu, steps, true_s * rng.uniform(0.98, 1.02)))
    return tuple(found)


def fits(rounds: int) -> tuple[list[float], list[float]]:
    """CPU milliseconds of fits from nothing, and from the last one."""
    fit(observed(Random(0)))  # Loads scipy.
    anew, again, guess = [], [], THETA
    for number in range(rounds):
        seen = observed(Random(number))
        begun_s = time.process_time()
        fit(seen)
        middle_s = time.process_time()
        guess = fit(seen, guess)
        anew.append(1e3 * (middle_s - begun_s))
        again.append(1e3 * (time.process_time() - middle_s))
    return anew, again


def blocked(rounds: int) -> tuple[list[float], list[float], list[float]]:
    """Milliseconds of wall time: handing over, an answer that re-tunes, an iteration without."""
    limits = BatchLimits(initial=128, total_max=8192, per_gpu_max=512)
    core, fitting = AdaptiveBatch(limits, 1, 4, fit_s=0.001), FitProcess()
    handed, taken, looked = [], [], []
    fitting.start()
    for _ in range(16):
        core.saw_squares(1.0 + 2000 / 128, 1.0 + 2000 / 256, 128, 256)
    for seen in observed(Random(1)):
        for _ in range(51):
            core.saw_iteration(seen.per_gpu, seen.accumulation, seen.iteration_s)
    core.due_fit(0.0)
    core.due_fit(1.0)
    for number in range(rounds):
        for _ in range(51):  # Trained since: one configuration.
            core.saw_iteration(8 + 2 * (number % CONFIGURATIONS), number % 3, 0.1)
        begun_s = time.perf_counter()
        wanted = core.due_fit(2.0 + number)
        assert isinstance(wanted, Wanted)
        assert fitting.ask(wanted)
        handed.append(1e3 * (time.perf_counter() - begun_s))
        while True:
            begun_s = time.perf_counter()
            theta = fitting.answer()
            if theta is not None:
                core.fitted(theta)
            spent_ms = 1e3 * (time.perf_counter() - begun_s)
            if theta is not None:
                taken.append(spent_ms)
                break
            looked.append(spent_ms)
            time.sleep(0.005)  # An iteration.
    fitting.close()
    return handed, taken, looked


def tunes(rounds: int) -> list[float]:
    core = AdaptiveBatch(BatchLimits(initial=128, total_max=8192, per_gpu_max=512), 1, 4)
    core.agent.adopt(THETA, 4)
    assert core.agent.model is not None
    found = []
    for _ in range(10 * rounds):
        begun_s = time.perf_counter()
        core.agent.model.tune(1, 4)
        found.append(1e3 * (time.perf_counter() - begun_s))
    return found


def row(name: str, ours: float, goal: float) -> Figure:
    return Figure(name, ours, goal, "ms", "goal", goal=1.0, lower_is_better=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if missing := blas_threads.one_each(os.environ):  # Read when numpy was loaded: once more.
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **missing})
    anew, again = fits(options.rounds)
    handed, taken, looked = blocked(options.rounds)
    median = statistics.median
    rows: list[Row] = [
        row("a fit of 64 observations: CPU, median", median(anew), 50.0),
        row("a fit of 64 observations: CPU, worst", max(anew + again), 400.0),
        row("a fit from the last one: CPU, median", median(again), 50.0),
        row("a choice of (m, s), median", median(tunes(options.rounds)), 1.0),
        row("thread blocked: observations handed over, median", median(handed), 1.0),
        row("thread blocked: answer taken, re-tuned, median", median(taken), 1.0),
        row("thread blocked: an iteration that looks, median", median(looked), 1.0),
    ]
    worst = {"handed over": max(handed), "answer": max(taken), "looks": max(looked)}
    show(f"Adapting, load {os.getloadavg()[0]:.1f}", rows)
    print("worst, ms (the machine was shared):", {k: round(v, 2) for k, v in worst.items()})
    if options.json is not None:
        write_json(options.json, this_command(), rows)
    if any(isinstance(each, Figure) and each.met is False for each in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
