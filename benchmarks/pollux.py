"""Pollux's search: time of a round and fitness, against the thesis' search, which we wrote anew.

    python benchmarks/pollux.py [--jobs 160] [--nodes 16] [--rounds 5]

The peer is the genetic algorithm of Qiao's thesis (section 3.4.2, appendix A.2) in plain numpy: 100
matrices, 100 generations of mutation, crossover by binary tournament, repair, and survival of the
fittest. It is elitist on fitness alone (the published NSGA-II also keeps a second objective, which
never raises the first). Both searches solve the same rounds in turn, each from its own population,
and the better plan is what the jobs run on in the next one; some jobs end and some come between
rounds. Jobs and their parameters are random, and tables and waiting order are ours on both sides:
no figure of the peer is published. With 160 jobs on 64 GPUs fitness says little but who waits.
"""

import argparse
from time import process_time

import numpy as np
from figures import Figure, show
from rich.console import Console

from slackwater.common.domains.models.fitness import fitness_of_worth, power_mean
from slackwater.common.domains.models.goodput import BatchLimits, GoodputModel
from slackwater.common.domains.models.throughput import ThroughputParams
from slackwater.schemas.base import JobId, NodeId
from slackwater.services.master.scheduling.policies.pollux import Memory, Pollux
from slackwater.services.master.scheduling.policies.pollux_search import Ints, Problem
from slackwater.services.master.scheduling.view import (
    Allocation,
    ClusterView,
    JobView,
    NodeView,
    View,
)

PEER = "re-implemented"
POPULATION, GENERATIONS = 100, 100
ROUND_S = 60.0


class Profile:
    """A job's report: random parameters of the size that the artifact's profiles have."""

    def __init__(self, rng: np.random.Generator) -> None:
        grad, sync = 10 ** rng.uniform(-2, -0.3), 10 ** rng.uniform(-2.5, -0.5)
        initial = int(2 ** rng.integers(3, 9))
        theta = ThroughputParams(
            grad * 0.2, grad * 0.8 / initial, sync * 0.3, sync * 0.03, sync, sync * 0.05,
            float(rng.uniform(1, 4)),
        )  # fmt: skip
        limits = BatchLimits(
            initial=initial, total_max=initial * 32, per_gpu_max=initial, per_gpu_min=initial // 4
        )
        self.model = GoodputModel(theta, initial * float(10 ** rng.uniform(-0.5, 2)), limits)
        self.gpus_seen = int(rng.integers(1, 9))

    def model_on(self, gpu_type: str) -> GoodputModel:
        return self.model


class Peer:
    """The thesis' search, written anew from its text: not the authors' program."""

    def __init__(self, problem: Problem, order: Ints, rng: np.random.Generator) -> None:
        self.problem, self.order, self.rng = problem, order, rng
        self.jobs, self.nodes = problem.base.shape

    def fitness(self, states: Ints) -> np.ndarray:
        """The sum of terms of each state, waiting included."""
        sizes, spread = states.sum(axis=2), np.count_nonzero(states, axis=2) > 1
        jobs = np.arange(self.jobs)[None, :]
        most = self.problem.worth.shape[3] - 1
        terms = self.problem.worth[jobs, 0, spread.astype(int), np.minimum(sizes, most)]
        same = np.all(states == self.problem.base, axis=2)
        terms = np.where(same, self.problem.stay, terms)
        terms = np.where(sizes == 0, self.problem.wait_worth, terms)
        return terms.sum(axis=1)

    def mutate(self, states: Ints) -> Ints:
        """Some jobs return to where they run, some elements become 0, some get GPUs: about one of
        those machines that have room, and one of those that the state uses already."""
        states, shape = states.copy(), states.shape
        back = self.rng.random(shape[:2]) < 0.1
        states[back] = np.broadcast_to(self.problem.base, shape)[back]
        lose = (self.rng.random(shape[:2]) < 0.1)[:, :, None] & (self.rng.random(shape) < 0.1)
        states[lose] = 0
        room = np.broadcast_to((self.problem.free - states.sum(axis=1) >= 1)[:, None, :], shape)
        used = room & (states > 0)
        by_room = room / np.maximum(room.sum(axis=1, keepdims=True), 1)
        by_use = used / np.maximum(used.sum(axis=1, keepdims=True), 1)
        gain = self.rng.random(shape) < by_room + by_use - by_room * by_use
        values = self.rng.integers(states, np.maximum(self.problem.free, states) + 1)
        return np.where(gain, values, states)

    def cross(self, states: Ints, fitness: np.ndarray) -> Ints:
        """Parents by binary tournament; children take the jobs before a point from one of them."""
        pairs = self.rng.integers(len(states), size=(2, len(states), 2))
        won = np.where(
            fitness[pairs[..., 0]] >= fitness[pairs[..., 1]], pairs[..., 0], pairs[..., 1]
        )
        points = self.rng.integers(self.jobs, size=len(states))
        first = (np.arange(self.jobs)[None, :] < points[:, None])[:, :, None]
        return np.where(first, states[won[0]], states[won[1]])

    def repair(self, states: Ints) -> Ints:
        """One distributed job a machine, sizes within bounds, no machine over its GPUs: who comes
        first (least service) keeps."""
        states = states[:, self.order]
        spread = np.count_nonzero(states, axis=2) > 1
        crowd = np.cumsum((states > 0) & spread[:, :, None], axis=1) > 1
        states = np.where(crowd & (states > 0) & spread[:, :, None], 0, states)
        shuffle = np.argsort(self.rng.random(states.shape), axis=2)
        states = np.take_along_axis(states, shuffle, axis=2)
        most = self.problem.gpus_max[self.order][None, :, None]
        states = np.diff(np.minimum(np.cumsum(states, axis=2), most), axis=2, prepend=0)
        states = np.take_along_axis(states, np.argsort(shuffle, axis=2), axis=2)
        states = np.minimum(np.cumsum(states, axis=1), self.problem.free)
        states = np.diff(states, axis=1, prepend=0)
        return states[:, np.argsort(self.order)]

    def search(self, states: Ints) -> tuple[Ints, np.ndarray]:
        missing = POPULATION - len(states)
        if missing > 0:
            more = states[self.rng.integers(len(states), size=missing)]
            states = np.concatenate([states, self.mutate(more)])
        states = self.repair(states)
        fitness = self.fitness(states)
        for _ in range(GENERATIONS):
            children = self.repair(self.mutate(self.cross(states, fitness)))
            states = np.concatenate([states, children])
            fitness = np.concatenate([fitness, self.fitness(children)])
            keep = np.argsort(-fitness, kind="stable")[:POPULATION]
            states, fitness = states[keep], fitness[keep]
        return states, fitness


def make_view(now_s: float, jobs: list[JobView], nodes: int) -> View:
    free = [4] * nodes
    for job in jobs:
        for node, gpus in job.allocation:
            free[node] -= gpus
    machines = tuple(NodeView(i, NodeId(f"n{i}"), 4) for i in range(nodes))
    cluster = ClusterView(machines, 4 * nodes, node_gpus_max=4)
    return View(now_s, cluster, {job.id: job for job in jobs}, free)


def newcomer(number: int, now_s: float, rng: np.random.Generator) -> JobView:
    return JobView(
        id=JobId(f"j{number}"), number=number, submitted_s=now_s - float(rng.integers(0, 3600)),
        gpus=1, gpus_min=1, gpus_max=64, profile=Profile(rng),
    )  # fmt: skip


def allocation_of(row: Ints) -> Allocation:
    return tuple((int(n), int(row[n])) for n in np.flatnonzero(row))


def compare(jobs_wanted: int, nodes: int, rounds: int, seed: int) -> list[Figure]:
    rng = np.random.default_rng(seed)
    policy = Pollux()
    policy.allocate(make_view(0.0, [newcomer(0, 0.0, rng)], nodes), None)  # Compiles.
    jobs = [newcomer(n, 0.0, rng) for n in range(jobs_wanted)]
    number, memory, peer_states = jobs_wanted, None, None
    times: list[tuple[float, float]] = []
    values: list[tuple[float, float]] = []
    for index in range(rounds):
        now_s = (index + 1) * ROUND_S
        view = make_view(now_s, jobs, nodes)
        problem, _ = policy.problem(view, jobs, {})
        begun = process_time()
        plan, memory = policy.allocate(view, memory)
        ours_s = process_time() - begun
        assert isinstance(memory, Memory)
        matrix = problem.base.copy()
        for j, job in enumerate(jobs):
            if job.id in plan.allocations:
                matrix[j] = 0
                for node, gpus in plan.allocations[job.id]:
                    matrix[j, node] = gpus
        order = np.array(sorted(range(len(jobs)), key=lambda j: jobs[j].attained_gpu_s(now_s)))
        peer = Peer(problem, order, rng)
        begun = process_time()
        peer_states, fitness = peer.search(
            problem.base[None] if peer_states is None else peer_states
        )
        times.append((ours_s, process_time() - begun))
        ours = float(peer.fitness(matrix[None])[0])
        values.append(
            tuple(fitness_of_worth(v, len(jobs), policy.p) for v in (ours, float(fitness[0])))  # type: ignore[arg-type]  # Two.
        )
        best = matrix if ours >= fitness[0] else peer_states[0]
        jobs = [
            job if allocation_of(row) == job.allocation else job.moved(allocation_of(row), now_s)
            for job, row in zip(jobs, best, strict=True)
        ]
        # One in twenty ends and is replaced by a new one.
        for j in np.flatnonzero(rng.random(len(jobs)) < 0.05):
            jobs[j] = newcomer(number, now_s, rng)
            number += 1
            peer_states[:, j] = 0
    ours_ms, peer_ms = (1e3 * float(np.median([t[i] for t in times])) for i in (0, 1))
    ours_fit, peer_fit = (float(np.mean([v[i] for v in values])) for i in (0, 1))
    name = f"{jobs_wanted} jobs, {nodes} machines of 4 GPUs"
    return [
        Figure(f"round, {name}", ours_ms, 100.0, "ms", "allowed", 1.0, lower_is_better=True),
        Figure(f"round, {name}", ours_ms, peer_ms, "ms", PEER, None, lower_is_better=True),
        Figure(f"fitness, {name}", ours_fit, peer_fit, "", PEER, 1.0),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, nargs="*", default=[160, 40])
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    figures: list[Figure] = []
    for jobs in options.jobs:
        figures += compare(jobs, options.nodes, options.rounds, options.seed)
    show("Pollux's search, CPU time of one core", figures)
    Console().print(f"An even split of speedups has fitness {power_mean([1.0], -1):.3f}.")


if __name__ == "__main__":
    main()
