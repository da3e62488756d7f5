"""Throughput of asynchronous SGD with a parameter server: Lin et al. (2018), sections III and VII.

One task per worker circulates: its worker's node (no queue), the uplink and the downlink of the
server (processor sharing), the server (first come, first served). Mean value analysis gives the
mini-batches per second from times profiled with a single worker. Three methods differ in how
transfers share a link (section III-C):

    exact   they share it equally at every instant: eq. 1, exact for this network as long as the
            server takes as long for each worker's gradient
    fcfs    one after the other, with deterministic times: eq. 2
    hybrid  gamma exact + (1 - gamma) fcfs with gamma = g(utilisation): eq. 3

Eq. 3 leaves open at which population the utilisation is taken. It is taken with the arriving task
removed (n - 1 tasks), like everything else that an arriving task finds, which needs no fixed point;
g is clipped to [0, 1].

Workers may differ. Alike, a population is its size, and the recursion is linear in it; different,
it is a subset up to `WORKERS_EXACT_MAX` (2^16 subsets), and beyond it the fixed point of Bard and
Schweitzer (`queueing_classes`). Subsets are exact where only computing and transfers differ. Where
the times at the server differ they are an approximation, as first come, first served has no product
form then. A solution says whether it is exact, and why not (`Solution.approximation`).

m parameter servers divide the times of the links and of the server by m: an even split, completed
at the same instant (section VII). `shares` says how unevenly they are loaded instead, and counts
that a worker waits for the slowest (`queueing_servers`).
"""

from collections.abc import Iterator, Mapping, Sequence
from math import sqrt
from typing import Final, Literal, NamedTuple, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from slackwater.common.base import limits
from slackwater.common.base.errors import Rejected
from slackwater.common.domains.models import queueing_classes as classes
from slackwater.common.domains.models.queueing_servers import by_shares, check_shares
from slackwater.common.domains.models.queueing_stations import (
    DOWNLINK,
    SERVER,
    UPLINK,
    Sharing,
    equal_share,
    one_by_one,
)

Floats = NDArray[np.float64]
Method = Literal["exact", "fcfs", "hybrid"]
Solver = Literal["mva", "mva-classes", "bard-schweitzer", "fork-join"]
WORKERS_EXACT_MAX: Final = 16
"""Workers that differ are solved by subsets up to here: 2^K states."""
UNDISTURBED_ROUNDS: Final = 60
"""Steps of the fixed point of `undisturbed`: each halves the error, about."""


class StepTimes(msgspec.Struct, frozen=True):
    """One worker's times for a mini-batch, each undisturbed, as profiled with one worker."""

    worker_s: float
    server_s: float = 0.0
    uplink_s: float = 0.0
    downlink_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.worker_s + self.server_s + self.uplink_s + self.downlink_s


class Solution(msgspec.Struct, frozen=True):
    workers: int
    throughput: float
    """Mini-batches per second of all workers together."""
    method: Method
    solver: Solver
    """`mva`: the recursion over alike workers; `mva-classes`: over subsets of different ones;
    `bard-schweitzer`: an approximation, for more different workers than subsets can be walked;
    `fork-join`: the recursion over servers of unequal load."""
    approximation: str
    """Why the throughput is not exact for the network; empty where it is."""
    utilization: Mapping[str, float]
    """Part of the time that each station is busy; `worker`: of the mean worker; of servers of
    unequal load, the busiest's."""
    worker_throughput: tuple[float, ...]
    """Mini-batches per second of each worker."""


def sharing_above(border: float = 0.8) -> Sharing:
    """Eq. 4: transfers overlap only on a link busier than `border`, all of them on a full one."""

    def gamma(utilization: Floats) -> Floats:
        return (utilization - border) / (1.0 - border)

    return gamma


EQ_4: Final = sharing_above(0.8)
"""The paper's g, measured on its cluster; another network needs one of its own."""


def method_sharing(method: Method, sharing: Sharing = EQ_4) -> Sharing:
    """The g that makes eq. 3 the method: 1 for exact, 0 for fcfs."""
    match method:
        case "exact":
            return equal_share
        case "fcfs":
            return one_by_one
        case "hybrid":
            return sharing


def solve(
    steps: Sequence[StepTimes],
    method: Method = "exact",
    *,
    servers: int = 1,
    shares: Sequence[float] = (),
    sharing: Sharing = EQ_4,
) -> Solution:
    """Steady state with these workers, one entry each. `shares`: see `throughputs`."""
    _check(steps, method, servers)
    gamma = method_sharing(method, sharing)
    solver: Solver = "mva"
    alike = all(step == steps[0] for step in steps[1:])
    if shares:
        if not alike:
            raise Rejected("workers differ and servers too; give either one time for all workers, "
                           "or servers that share evenly")  # fmt: skip
        rates = throughputs(steps[0], len(steps), method, servers=servers, shares=shares,
                            sharing=sharing)  # fmt: skip
        each, solver = np.full(len(steps), rates[-1] / len(steps)), "fork-join"
    elif alike:
        rates = _alike(steps[0], len(steps), gamma, servers)
        each, solver = np.full(len(steps), rates[-1] / len(steps)), "mva"
    else:
        worker_s = np.array([step.worker_s for step in steps])
        visits_s = np.array([_visits_s(step, servers) for step in steps])
        if len(steps) <= WORKERS_EXACT_MAX:
            each, solver = classes.by_subsets(worker_s, visits_s, gamma), "mva-classes"
        else:
            each, solver = classes.bard_schweitzer(worker_s, visits_s, gamma), "bard-schweitzer"
    working = sum(x * step.worker_s for x, step in zip(each, steps, strict=True)) / len(steps)
    part = max(shares, default=1.0)
    busy = part * sum(x * _visits_s(step, servers) for x, step in zip(each, steps, strict=True))
    utilization = {
        "worker": float(working), "uplink": float(busy[UPLINK]), "server": float(busy[SERVER]),
        "downlink": float(busy[DOWNLINK]),
    }  # fmt: skip
    return Solution(
        len(steps), float(each.sum()), method, solver, _approximation(steps, method, solver),
        utilization, tuple(map(float, each)),
    )  # fmt: skip


def _approximation(steps: Sequence[StepTimes], method: Method, solver: Solver) -> str:
    reasons = []
    if solver == "bard-schweitzer":
        reasons.append(
            f"more than {WORKERS_EXACT_MAX} different workers: Bard and Schweitzer's estimate"
        )
    if solver == "fork-join":
        reasons.append("the join of several servers is estimated, within 1.5 % in small cases")
    if any(step.server_s != steps[0].server_s for step in steps):
        reasons.append("times at the server differ, and first come, first served is solved only "
                       "for equal ones")  # fmt: skip
    if method != "exact":
        reasons.append(f"method {method} follows measurements (eqs. 2 and 3)")
    return "; ".join(reasons)


def throughputs(
    step: StepTimes,
    workers: int,
    method: Method = "exact",
    *,
    servers: int = 1,
    shares: Sequence[float] = (),
    sharing: Sharing = EQ_4,
) -> Floats:
    """X(0), X(1), ..., X(workers) of alike workers: one recursion gives all of them. `shares`:
    part of the bytes that each server holds, instead of `servers` that hold equally much."""
    _check([step], method, servers)
    if not 1 <= workers <= limits.MODEL_WORKERS_MAX:
        raise Rejected(f"workers is {workers}; give 1 to {limits.MODEL_WORKERS_MAX}")
    gamma = method_sharing(method, sharing)
    if shares:
        if servers != 1:
            raise Rejected(f"servers is {servers} beside shares, which count them; leave it out")
        check_shares(shares)
        rates = by_shares(step.worker_s, _visits_s(step, 1), shares, workers, gamma)
    else:
        rates = _alike(step, workers, gamma, servers)
    return np.concatenate(([0.0], rates))


def _alike(step: StepTimes, workers: int, gamma: Sharing, servers: int) -> Floats:
    """X(1..workers)."""
    return np.fromiter((each.rate for each in _populations(step, workers, gamma, servers)), float)


class _Population(NamedTuple):
    """So many tasks: mini-batches a second, and seconds that each stays at every station."""

    rate: float
    uplink_s: float
    downlink_s: float
    server_s: float


def _populations(
    step: StepTimes, workers: int, gamma: Sharing, servers: int
) -> Iterator[_Population]:
    """Walk 1 to `workers`. Plain numbers: arrays of three stations would cost ten times as much."""
    up_s, down_s, server_s = map(float, _visits_s(step, servers))
    up = down = server = 0.0  # tasks at each station, and how busy the links are, with n - 1 tasks
    busy = np.zeros(2)
    for n in range(1, workers + 1):
        overlap_up, overlap_down = gamma(busy).tolist()
        up_busy, down_busy = busy.tolist()
        up_r_s = up_s * (1.0 + up - 0.5 * (1.0 - _clip(overlap_up)) * up_busy)
        down_r_s = down_s * (1.0 + down - 0.5 * (1.0 - _clip(overlap_down)) * down_busy)
        server_r_s = server_s * (1.0 + server)
        rate = n / (step.worker_s + up_r_s + down_r_s + server_r_s)
        up, down, server = rate * up_r_s, rate * down_r_s, rate * server_r_s
        busy[0], busy[1] = rate * up_s, rate * down_s
        yield _Population(rate, up_r_s, down_r_s, server_r_s)


def undisturbed(seen: StepTimes, workers: int) -> StepTimes:
    """Reckon out of a worker's times, measured while `workers` alike ones trained, how they wait
    for each other: the times whose exact analysis gives `seen`. Section III-B profiles one worker
    alone, which a job that runs already does not offer."""
    _check([seen], "exact", 1)
    own = seen
    for _ in range(UNDISTURBED_ROUNDS):
        *_, stays = _populations(own, workers, equal_share, 1)
        own = StepTimes(
            worker_s=seen.worker_s,
            server_s=_closer(own.server_s, stays.server_s, seen.server_s),
            uplink_s=_closer(own.uplink_s, stays.uplink_s, seen.uplink_s),
            downlink_s=_closer(own.downlink_s, stays.downlink_s, seen.downlink_s),
        )
    return own


def _closer(own_s: float, stay_s: float, seen_s: float) -> float:
    """Half of the way, as ratios: what is shortened at one station lengthens queues at others."""
    return own_s * sqrt(seen_s / stay_s) if stay_s > 0 else 0.0


def _clip(part: float) -> float:
    return min(max(part, 0.0), 1.0)


def _visits_s(step: StepTimes, servers: int) -> Floats:
    return np.array([step.uplink_s, step.downlink_s, step.server_s]) / servers


def _check(steps: Sequence[StepTimes], method: str, servers: int) -> None:
    if not 1 <= len(steps) <= limits.MODEL_WORKERS_MAX:
        raise Rejected(f"there are {len(steps)} workers; give 1 to {limits.MODEL_WORKERS_MAX}")
    if method not in get_args(Method):
        raise Rejected(f"method is {method!r}; choose one of {', '.join(get_args(Method))}")
    if servers < 1:
        raise Rejected(f"servers is {servers}; at least one parameter server is needed")
    for step in dict.fromkeys(steps):
        for field in ("worker_s", "server_s", "uplink_s", "downlink_s"):
            value = getattr(step, field)
            low, high = limits.MODEL_STEP_S_MIN, limits.TRACE_SECONDS_MAX
            if value != 0 and not low <= value <= high:
                raise Rejected(f"{field} is {value}; give 0, or {low:g} to {high:g} seconds")
        if step.total_s <= 0:
            raise Rejected("a mini-batch takes no time at any station; give at least one time")
