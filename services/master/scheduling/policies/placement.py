"""On which machines a job's GPUs lie (Tiresias section 3.3.3).

A job whose model is skewed (its largest tensor dominates: VGG, AlexNet) suffers when it is spread,
so it is put on as few machines as possible; every other job fills the holes, to decrease
fragmentation. The border is PACKLIMIT: `learn_pack_limit` finds it from the history of placements
and speeds, with the linear classifier of one feature that the paper names.

`plan_ilp` is the paper's integer programme (section 3.3.3.1) as a comparator on small cases. Its
traffic term multiplies two unknowns, workers on a machine (w_i) and servers on it (p_ji); with
p_ji binary each product w_i * p_ji is replaced by a variable z_ji between max(0, w_i - W(1 - p_ji))
and min(w_i, W p_ji), which is exact.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import NamedTuple

from slackwater.schemas.base import JobId
from slackwater.schemas.gpus import Within
from slackwater.services.master.scheduling.hosts import HostUse
from slackwater.services.master.scheduling.meeting import meeting
from slackwater.services.master.scheduling.view import NOTHING, Allocation, JobView, View


class Placer:
    """Free GPUs of every machine while a plan is made: stops give back, placements take."""

    __slots__ = ("_free", "_hosts", "_single", "_stops", "_turning", "_view")

    def __init__(self, view: View, stops: Collection[JobId] = ()) -> None:
        self._view = view
        self._free = list(view.free)
        self._single = len(self._free) == 1
        self._stops = stops
        self._hosts: HostUse | None = None
        self._turning: dict[JobId, Allocation] | None = None
        for job_id in stops:
            self.give_back(view.jobs[job_id].allocation)

    def give_back(self, allocation: Allocation) -> None:
        for node, gpus in allocation:
            self._free[node] += gpus

    def take(self, allocation: Allocation) -> None:
        for node, gpus in allocation:
            self._free[node] -= gpus

    def place_job(self, job: JobView, gpu_type: str, mode: str) -> Allocation:
        """Place all GPUs of a job beside the cores and the main memory that it needs.

        NOTHING where no machines have them; whoever holds them is not counted as lower in order.
        """
        if not job.cores and not job.memory_bytes:
            return self._placed(job, gpu_type, mode)
        if self._hosts is None:
            stopped = {*self._stops}
            running = (other for other in self._view.jobs.values() if other.id not in stopped)
            self._hosts = HostUse(self._view.cluster, running)
        # Only as many GPUs of a machine count as it can feed.
        whole = self._free
        self._free = [min(free, self._hosts.fitting(job, i)) for i, free in enumerate(whole)]
        allocation = self._placed(job, gpu_type, mode)
        self._free = whole
        self.take(allocation)
        self._hosts.add(job, allocation)
        return allocation

    def _placed(self, job: JobView, gpu_type: str, mode: str) -> Allocation:
        if job.one_each and not self._single:
            return self._one_each(job, gpu_type)
        if job.anywhere:
            mode = "prefer"
        return self.place(job.gpus, gpu_type, mode, job.within)

    def place(
        self, gpus: int, gpu_type: str = "", mode: str = "prefer", within: Within = ""
    ) -> Allocation:
        """`prefer` few machines, `require` the fewest possible, `no`: fill holes, or `emptiest`:
        the emptiest machine first. Few machines are one, else some of one rack, else any. `within`
        one machine or rack: nothing else will do. NOTHING: no room (or no consolidated room)."""
        if within and not self._single:
            allocation = self._together(gpus, gpu_type, mode, within)
        elif self._single:
            allocation = ((0, gpus),) if self._free[0] >= gpus else NOTHING
        elif mode == "no":
            allocation = self._fill_holes(gpus, gpu_type)
        elif mode == "emptiest":
            allocation = self._emptiest(gpus, gpu_type)
        else:
            allocation = self._few_machines(gpus, gpu_type, mode == "require")
        self.take(allocation)
        return allocation

    def _nodes(self, gpu_type: str) -> list[tuple[int, int]]:
        """(free, index) of the machines of that type with anything free."""
        if len(self._view.cluster.gpu_types) == 1:
            return [(free, i) for i, free in enumerate(self._free) if free > 0]
        nodes = self._view.cluster.nodes
        return [
            (free, i)
            for i, free in enumerate(self._free)
            if free > 0 and nodes[i].gpu_type == gpu_type
        ]

    def _few_machines(self, gpus: int, gpu_type: str, require: bool) -> Allocation:
        nodes = self._nodes(gpu_type)
        one = min(((free, i) for free, i in nodes if free >= gpus), default=None)
        if one is not None:
            return ((one[1], gpus),)
        fewest = self._view.cluster.fewest_nodes(gpus, gpu_type) if require else len(nodes)
        for taken in (self._in_one_rack(gpus, nodes), _packed(gpus, nodes)):
            if taken and len(taken) <= fewest:
                return taken
        return NOTHING

    def _together(self, gpus: int, gpu_type: str, mode: str, within: Within) -> Allocation:
        """Place all GPUs on one machine or in one rack: on few machines, whatever the mode is."""
        one = min(((free, i) for free, i in self._nodes(gpu_type) if free >= gpus), default=None)
        if one is not None:
            return ((one[1], gpus),)
        if within == "node":
            return NOTHING
        nodes, cluster = self._nodes(gpu_type), self._view.cluster
        taken = self._in_one_rack(gpus, nodes) if cluster.racks else _packed(gpus, nodes)
        fewest = cluster.fewest_nodes(gpus, gpu_type) if mode == "require" else len(nodes)
        return taken if len(taken) <= fewest else NOTHING

    def _in_one_rack(self, gpus: int, nodes: Sequence[tuple[int, int]]) -> Allocation:
        """Choose the rack on the fewest of whose machines they fit, of these the tightest. NOTHING:
        there is none, or there are no racks to choose from."""
        cluster = self._view.cluster
        racks: dict[str, list[tuple[int, int]]] = {name: [] for name in cluster.racks}
        for free, index in nodes if racks else ():
            racks[cluster.nodes[index].rack].append((free, index))
        fits = [
            (len(taken), sum(free for free, _ in there), name, taken)
            for name, there in racks.items()
            if (taken := _packed(gpus, there))
        ]
        return min(fits)[3] if fits else NOTHING

    def _fill_holes(self, gpus: int, gpu_type: str) -> Allocation:
        return _take_in_turn(gpus, sorted(self._nodes(gpu_type)))

    def _one_each(self, job: JobView, gpu_type: str) -> Allocation:
        """One of each machine, on idle ones or else those of the smallest group that has as many:
        jobs that take turns share them. With fewer machines they have several."""
        gpus = job.gpus
        nodes = self._by_group(gpus, self._nodes(gpu_type))
        if sum(free for free, _ in nodes) < gpus:
            return NOTHING
        taken = dict.fromkeys((index for _, index in nodes), 0)
        while gpus > 0:
            for free, index in nodes:
                if gpus and taken[index] < free:
                    taken[index] += 1
                    gpus -= 1
        allocation = tuple(sorted((index, count) for index, count in taken.items() if count))
        self.take(allocation)
        self._turns()[job.id] = allocation
        return allocation

    def _turns(self) -> dict[JobId, Allocation]:
        """Return where jobs are that share machines by turns, those of this plan among them."""
        if self._turning is None:
            jobs = self._view.jobs.values()
            running = (j for j in jobs if j.one_each and j.allocation and j.id not in self._stops)
            self._turning = {job.id: job.allocation for job in running}
        return self._turning

    def _by_group(self, gpus: int, nodes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Sort (free, index) such that those come first on which a job that takes turns is to be
        measured: of the group with the fewest jobs that has so many machines with room (Lee 2020,
        section 4.3.2)."""
        places = {job: [index for index, _ in there] for job, there in self._turns().items()}
        here = Counter(index for there in places.values() for index in there)
        sizes = [(len(jobs), machines) for jobs, machines in meeting(places)]
        sizes.append((0, {index for _, index in nodes if not here[index]}))
        enough = (
            (size, min(machines), machines)
            for size, machines in sizes
            if sum(index in machines for _, index in nodes) >= gpus > 0
        )
        _, _, best = min(enough, key=lambda each: each[:2], default=(0, 0, set[int]()))
        return sorted(nodes, key=lambda node: (node[1] not in best, here[node[1]], node[1]))

    def _emptiest(self, gpus: int, gpu_type: str) -> Allocation:
        return _take_in_turn(gpus, sorted(self._nodes(gpu_type), key=lambda n: (-n[0], n[1])))


def _packed(gpus: int, nodes: Sequence[tuple[int, int]]) -> Allocation:
    """Take from few of these (free, index); NOTHING: they have too little together."""
    left = sorted(nodes, key=lambda node: (-node[0], node[1]))
    taken: list[tuple[int, int]] = []
    need = gpus
    while need > 0 and left:
        # The last machine is the tightest that closes the gap, the ones before the emptiest.
        last = min(((free, i) for free, i in left if free >= need), default=None)
        free, index = last if last is not None else left[0]
        left.remove((free, index))
        taken.append((index, min(free, need)))
        need -= min(free, need)
    return NOTHING if need > 0 else tuple(sorted(taken))


def _take_in_turn(gpus: int, nodes: Sequence[tuple[int, int]]) -> Allocation:
    """From each (free, index) what it has until there are enough; NOTHING: there are not."""
    taken: list[tuple[int, int]] = []
    need = gpus
    for free, index in nodes:
        taken.append((index, min(free, need)))
        need -= min(free, need)
        if need == 0:
            return tuple(sorted(taken))
    return NOTHING


class Observation(NamedTuple):
    """An observation from history of one placement that could have been consolidated and was
    not."""

    skew: float
    relative_speed: float
    """The job's speed, over its speed when consolidated."""


SENSITIVE_BELOW = 0.95
"""A job that keeps less than this of its speed when spread is one to consolidate."""

PACK_LIMIT = (0.61 + 0.146) / 2
"""The limit without history: half-way between the two groups of table 3.3."""


def learn_pack_limit(history: Sequence[Observation], fallback: float = PACK_LIMIT) -> float:
    """The skew above which to consolidate: the threshold that errs least on history, half-way
    between two observed skews; of equally good ones the one nearest to `fallback`."""
    labelled = sorted((o.skew, o.relative_speed < SENSITIVE_BELOW) for o in history)
    if not labelled:
        return fallback
    skews = [skew for skew, _ in labelled]
    borders = [skews[0] / 2]
    # Where a and b are neighbouring floats, (a + b) / 2 rounds to one of them. The border is then
    # a, so that b stays above it.
    borders += [mid if (mid := (a + b) / 2) < b else a for a, b in pairwise(skews) if b > a]
    borders.append((skews[-1] + 1) / 2)

    def errors(border: float) -> int:
        return sum((skew > border) != sensitive for skew, sensitive in labelled)

    return min(borders, key=lambda border: (errors(border), abs(border - fallback)))


class IlpPlacement(NamedTuple):
    """An optimum of the programme: the largest load of a machine, and one way to get it."""

    max_traffic: float
    workers: tuple[int, ...]
    server_nodes: tuple[int, ...]


def plan_ilp(
    workers: int, server_sizes: Sequence[float], free: Sequence[int], traffic: Sequence[float]
) -> IlpPlacement | None:
    """Minimise the largest T_i = t_i + w_i (M - sum_j p_ji s_j) + sum_j p_ji s_j (W - w_i).

    `free` and `traffic` are g_i and t_i of each machine, `server_sizes` the s_j; None: no room.
    """
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp

    nodes, servers = len(free), len(server_sizes)
    model = float(sum(server_sizes))
    # Unknowns: w_i, then p_ji and z_ji (row by row of servers), then the bound T.
    p0, z0 = nodes, nodes + nodes * servers
    count = z0 + nodes * servers + 1
    rows: list[np.ndarray] = []
    low: list[float] = []
    high: list[float] = []

    def constrain(terms: dict[int, float], at_least: float, at_most: float) -> None:
        row = np.zeros(count)
        for column, value in terms.items():
            row[column] += value
        rows.append(row)
        low.append(at_least)
        high.append(at_most)

    constrain(dict.fromkeys(range(nodes), 1.0), workers, workers)
    for j in range(servers):
        constrain({p0 + j * nodes + i: 1.0 for i in range(nodes)}, 1, 1)
    for i in range(nodes):
        # T_i = t_i + M w_i + W sum_j s_j p_ji - 2 sum_j s_j z_ji
        terms = {i: model, count - 1: -1.0}
        for j, size in enumerate(server_sizes):
            p, z = p0 + j * nodes + i, z0 + j * nodes + i
            terms[p], terms[z] = workers * size, -2.0 * size
            constrain({z: 1.0, i: -1.0}, -np.inf, 0)
            constrain({z: 1.0, p: -float(workers)}, -np.inf, 0)
            constrain({z: 1.0, i: -1.0, p: -float(workers)}, -float(workers), np.inf)
        constrain(terms, -np.inf, -float(traffic[i]))
    upper = np.concatenate(
        [np.minimum(free, workers), np.ones(nodes * servers), np.full(nodes * servers, workers)]
    )
    objective = np.zeros(count)
    objective[-1] = 1.0
    whole = np.concatenate([np.ones(count - 1), [0]])
    solution = milp(
        objective,
        constraints=LinearConstraint(np.array(rows), np.array(low), np.array(high)),
        bounds=Bounds(np.zeros(count), np.append(upper, np.inf)),
        integrality=whole,
    )
    if solution.x is None:
        return None
    values = np.rint(solution.x[:-1]).astype(int)
    hosts = values[p0:z0].reshape(servers, nodes).argmax(axis=1)
    return IlpPlacement(
        float(solution.x[-1]), tuple(map(int, values[:nodes])), tuple(map(int, hosts))
    )
