"""Cruise's configuration of different machines as a mixed-integer programme, on HiGHS.

Lee's dissertation, figure 3.2, minimises over roles and shares a maximum with products of unknowns:
mini-batches of worker i times its transfer time q_i, and server shares times the number of workers.
Here, as in the paper, shares are counted in binary; the rest is linearised exactly:

- The number of workers n is fixed, one programme each, so that m_j n is linear.
- Training data comes in `blocks`, k_i = sum_b 2^b z_ib of them on worker i. Each product z_ib q_i
  is a variable y_ib >= q_i - Q (1 - z_ib), y_ib >= q_low z_ib: exact at z_ib = 0 and 1.
- A worker without data is better a server (it would only crowd the others), so k_i >= w_i.
- Machines alike hold data in descending order, or every solution is found in all permutations.

An n whose lower bound lies above what is already found is not solved: machine i's transfers take at
least q_low (the whole model over the n-fold crowded best servers, or over its own link), and n
workers finish no earlier than the n fastest would with those. The first solution comes from a
proportional rule (each share as its machine's speed, section 3.4.2).

Instances are finer than blocks. With the roles found, data is shared out so that all workers end
together, and the model's shares are the linear programme's for that data, in turn until neither
helps: `epoch_s` is then at most that of the best solution in whole blocks.
"""

from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np
import scipy  # Its parts are loaded when they are used: the commands start without.
from numpy.typing import NDArray

from slackwater.common.base import limits
from slackwater.common.base.errors import Fatal, Rejected
from slackwater.common.domains.models.cost import (
    Configuration,
    Machine,
    Training,
    check,
    epoch_s,
    link_matrix,
)

Floats = NDArray[np.float64]
SMOOTHINGS_MAX: Final = 50
SMOOTHING_GAIN: Final = 1e-9


class _Problem(msgspec.Struct):
    training: Training
    machines: Sequence[Machine]
    blocks: int
    links: Floats
    compute_s: Floats
    """Seconds of computing that a block takes, by machine."""
    batches: float
    """In a block."""


def different_optimum(
    training: Training,
    machines: Sequence[Machine],
    *,
    blocks: int = limits.MODEL_BLOCKS,
    time_limit_s: float = limits.MODEL_TIME_LIMIT_S,
    gap: float = 1e-4,
    whole_blocks: bool = False,
) -> Configuration:
    """The best roles and shares, to a relative `gap` in whole blocks of data, and then better.
    `proven` is False if time ran out first."""
    check(training, machines)
    if training.server_s or training.whole_batches:
        raise Rejected("server_s and whole_batches are for machines of at most two kinds")
    count = len(machines)
    if not 2 <= count <= limits.MODEL_MACHINES_MIP_MAX:
        raise Rejected(f"there are {count} machines; give 2 to {limits.MODEL_MACHINES_MIP_MAX}")
    check_search(blocks, time_limit_s)
    block = training.instances / blocks
    problem = _Problem(
        training, machines, blocks, link_matrix(machines),
        np.array([machine.instance_s * block for machine in machines]), block / training.batch,
    )  # fmt: skip
    counts = range(1, min(count - 1, blocks) + 1)
    best = min((_proportional(problem, n) for n in counts), key=lambda found: found.epoch_s)
    bounds_s = {n: _lower_bound_s(problem, n) for n in counts}
    proven = True
    promising = [n for n in counts if bounds_s[n] < best.epoch_s * (1 - gap)]
    for n in sorted(promising, key=lambda n: bounds_s[n]):
        if bounds_s[n] >= best.epoch_s * (1 - gap):
            break
        share_s = time_limit_s / len(promising)
        found, exhausted = _solve(problem, n, best.epoch_s, share_s, gap)
        proven &= exhausted
        if found is not None and found.epoch_s < best.epoch_s:
            best = found
    if not whole_blocks:
        best = _smoothed(problem, best)
    return msgspec.structs.replace(best, proven=proven)


def check_search(blocks: int, time_limit_s: float) -> None:
    """Raise Rejected for bounds of a search that cannot be."""
    if not 1 <= blocks <= limits.MODEL_BLOCKS_MAX:
        raise Rejected(f"blocks is {blocks}; give 1 to {limits.MODEL_BLOCKS_MAX}")
    if not 0 < time_limit_s <= limits.TRACE_SECONDS_MAX:
        raise Rejected(f"time_limit_s is {time_limit_s}; give seconds above 0")


def _smoothed(problem: _Problem, found: Configuration) -> Configuration:
    """Share out data and model continuously among the roles found."""
    working = [i for i, role in enumerate(found.workers) if role]
    serving = [j for j, role in enumerate(found.workers) if not role]
    links = problem.links[np.ix_(working, serving)]
    held = np.array(found.model_bytes)[serving]
    best = found
    for _ in range(SMOOTHINGS_MAX):
        each_s = held / links
        transfer_s = np.maximum(each_s.max(axis=1) * len(working), each_s.sum(axis=1))
        block_s = problem.compute_s[working] + problem.batches * transfer_s
        speed = 1.0 / np.maximum(block_s, 1e-300)
        blocks = np.zeros(len(found.workers))
        blocks[working] = problem.blocks * speed / speed.sum()
        model = np.zeros(len(found.workers))
        model[serving] = held
        moved = _configuration(problem, found.workers, blocks, model)
        if moved.epoch_s >= best.epoch_s * (1 - SMOOTHING_GAIN):
            return moved if moved.epoch_s < best.epoch_s else best
        best = moved
        held = _best_held(problem, working, links, blocks[working])
    return best


def _best_held(problem: _Problem, working: list[int], links: Floats, blocks: Floats) -> Floats:
    """The servers' bytes for this data, by linear programming over (shares, epoch)."""
    servers = links.shape[1]
    scale = (blocks * problem.batches)[:, None] * problem.training.model_bytes / links
    busiest = np.zeros((len(working) * servers, servers + 1))
    for at, row in enumerate(scale):
        busiest[at * servers : (at + 1) * servers, :servers] = np.diag(row * len(working))
    own = np.hstack([scale, np.zeros((len(working), 1))])
    rows = np.vstack([busiest, own])
    rows[:, servers] = -1.0
    compute_s = problem.compute_s[working] * blocks
    right = -np.concatenate([np.repeat(compute_s, servers), compute_s])
    whole = np.append(np.ones(servers), 0.0)
    answer = scipy.optimize.linprog(
        np.append(np.zeros(servers), 1.0), A_ub=rows, b_ub=right, A_eq=whole[None, :], b_eq=[1.0]
    )
    if answer.x is None:
        raise Fatal(f"shares of {servers} servers: {answer.message}; a share of each always exists")
    shares: Floats = np.maximum(np.asarray(answer.x)[:servers], 0.0)
    held: Floats = shares / shares.sum() * problem.training.model_bytes
    return held


def _transfer_low_s(problem: _Problem, workers: int) -> Floats:
    """The least that machine i can need for a model while n machines are workers."""
    model = problem.training.model_bytes
    links = np.sort(problem.links, axis=1)[:, ::-1]
    servers = links[:, : len(problem.machines) - workers]
    low_s: Floats = np.maximum(model * workers / servers.sum(axis=1), model / servers[:, 0])
    return low_s


def _lower_bound_s(problem: _Problem, workers: int) -> float:
    block_s = problem.compute_s + problem.batches * _transfer_low_s(problem, workers)
    rates = np.sort(1.0 / np.maximum(block_s, 1e-300))[::-1][:workers]
    return float(problem.blocks / rates.sum())


def _proportional(problem: _Problem, workers: int) -> Configuration:
    """Shares as the machines' speeds; servers are the machines that compute slowest, the better
    linked first."""
    machines, model = problem.machines, problem.training.model_bytes
    order = sorted(
        range(len(machines)), key=lambda i: (machines[i].instance_s, machines[i].bytes_per_s, i)
    )
    working, serving = sorted(order[:workers]), sorted(order[workers:])
    links = np.array([machines[j].bytes_per_s for j in serving])
    held = np.zeros(len(machines))
    held[serving] = model * links / links.sum()
    each_s = held[serving] / problem.links[np.ix_(working, serving)]
    transfer_s = np.maximum(each_s.max(axis=1) * workers, each_s.sum(axis=1))
    speed = 1.0 / (problem.compute_s[working] + problem.batches * transfer_s)
    exact = problem.blocks * speed / speed.sum()
    counts = np.maximum(np.floor(exact), 1).astype(int)
    while counts.sum() != problem.blocks:
        step = 1 if counts.sum() < problem.blocks else -1
        # The worker that is furthest below (or above) its share, of those that keep a block.
        room = np.where(counts + step >= 1, step * (exact - counts), -np.inf)
        counts[int(np.argmax(room))] += step
    blocks = np.zeros(len(machines))
    blocks[working] = counts
    return _configuration(problem, [i in set(working) for i in range(len(machines))], blocks, held)


def _configuration(
    problem: _Problem, workers: Sequence[bool], blocks: Floats, held: Floats
) -> Configuration:
    training = problem.training
    instances = tuple(float(k) * training.instances / problem.blocks for k in blocks)
    shares = tuple(map(float, held))
    return Configuration(
        tuple(workers), instances, shares,
        epoch_s(training, problem.machines, workers, instances, shares),
    )  # fmt: skip


class _Columns:
    """Where each variable stands: w, z, y, q, m, T, in this order."""

    def __init__(self, machines: int, bits: int) -> None:
        self.machines, self.bits = machines, bits
        self.role = 0
        self.bit = machines
        self.product = self.bit + machines * bits
        self.transfer = self.product + machines * bits
        self.held = self.transfer + machines
        self.epoch = self.held + machines
        self.count = self.epoch + 1


class _Rows:
    """Sparse constraints: low <= sum of coefficients <= high."""

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._entries: list[tuple[int, int, float]] = []
        self._low: list[float] = []
        self._high: list[float] = []

    def add(self, entries: Sequence[tuple[int, float]], low: float, high: float) -> None:
        row = len(self._low)
        self._entries += [(row, column, value) for column, value in entries]
        self._low.append(low)
        self._high.append(high)

    def constraint(self) -> Any:
        rows, columns, values = zip(*self._entries, strict=True)
        matrix = scipy.sparse.csr_array(
            (values, (rows, columns)), shape=(len(self._low), self._columns)
        )
        return scipy.optimize.LinearConstraint(matrix, self._low, self._high)


def _solve(
    problem: _Problem, workers: int, cutoff_s: float, time_limit_s: float, gap: float
) -> tuple[Configuration | None, bool]:
    """The best with n workers that beats the cutoff, if any, and whether the search was complete.
    Times are in units of the cutoff and the model in units of itself: numbers near 1."""
    count = len(problem.machines)
    most = problem.blocks - workers + 1
    columns = _Columns(count, most.bit_length())
    rows = _Rows(columns.count)
    low = _transfer_low_s(problem, workers) * problem.batches / cutoff_s
    _roles_and_shares(rows, columns, problem, workers, most)
    _transfers(rows, columns, problem, workers, cutoff_s, low)
    _epochs(rows, columns, problem, cutoff_s, low)
    lower = np.zeros(columns.count)
    upper = np.ones(columns.count)
    # A worker's transfers for one block take no longer than the epoch: every time is at most 1.
    integral = np.zeros(columns.count)
    integral[: columns.product] = 1
    cost = np.zeros(columns.count)
    cost[columns.epoch] = 1
    answer = scipy.optimize.milp(
        cost, integrality=integral,
        bounds=scipy.optimize.Bounds(lower, upper), constraints=rows.constraint(),
        options={"time_limit": time_limit_s, "mip_rel_gap": gap},
    )  # fmt: skip
    complete = answer.status in (0, 2)  # Solved to the gap, or nothing beats the cutoff.
    if answer.x is None:
        return None, complete
    x = np.asarray(answer.x)
    bits = x[columns.bit : columns.product].reshape(count, columns.bits).round()
    roles = [bool(round(value)) for value in x[:count]]
    held = np.maximum(x[columns.held : columns.epoch], 0.0) * [not role for role in roles]
    held *= problem.training.model_bytes / held.sum()
    return _configuration(problem, roles, bits @ 2.0 ** np.arange(columns.bits), held), complete


def _roles_and_shares(
    rows: _Rows, columns: _Columns, problem: _Problem, workers: int, most: int
) -> None:
    machines = range(columns.machines)
    blocks = [
        [(columns.bit + i * columns.bits + b, float(1 << b)) for b in range(columns.bits)]
        for i in machines
    ]
    rows.add([(columns.role + i, 1.0) for i in machines], workers, workers)
    rows.add([entry for row in blocks for entry in row], problem.blocks, problem.blocks)
    rows.add([(columns.held + j, 1.0) for j in machines], 1.0, 1.0)
    seen: dict[Machine, int] = {}
    for i in machines:
        rows.add([*blocks[i], (columns.role + i, -1.0)], 0.0, np.inf)
        rows.add([*blocks[i], (columns.role + i, -float(most))], -np.inf, 0.0)
        rows.add([(columns.held + i, 1.0), (columns.role + i, 1.0)], -np.inf, 1.0)
        twin = seen.get(problem.machines[i])
        if twin is not None:
            less = [(column, -value) for column, value in blocks[i]]
            rows.add([*blocks[twin], *less], 0.0, np.inf)
        seen[problem.machines[i]] = i


def _transfers(
    rows: _Rows,
    columns: _Columns,
    problem: _Problem,
    workers: int,
    cutoff_s: float,
    low: Floats,
) -> None:
    """q_i >= m_j n / b_ij for each j and q_i >= sum_j m_j / b_ij, for workers."""
    scale = problem.training.model_bytes * problem.batches / cutoff_s
    for i in range(columns.machines):
        all_of_them = []
        for j in range(columns.machines):
            if i == j:
                continue
            each = scale / problem.links[i, j]
            all_of_them.append((columns.held + j, -each))
            slack = each * workers
            busiest = [(columns.transfer + i, 1.0), (columns.held + j, -slack)]
            rows.add([*busiest, (columns.role + i, -slack)], -slack, np.inf)
        slack = -min(value for _, value in all_of_them)
        rows.add(
            [(columns.transfer + i, 1.0), *all_of_them, (columns.role + i, -slack)], -slack, np.inf
        )
        rows.add([(columns.transfer + i, 1.0), (columns.role + i, -float(low[i]))], 0.0, np.inf)


def _epochs(
    rows: _Rows, columns: _Columns, problem: _Problem, cutoff_s: float, low: Floats
) -> None:
    """T >= c_i k_i + sum_b 2^b y_ib, with y_ib standing for z_ib q_i."""
    for i in range(columns.machines):
        entries = [(columns.epoch, 1.0)]
        for b in range(columns.bits):
            bit = columns.bit + i * columns.bits + b
            product = columns.product + i * columns.bits + b
            rows.add([(product, 1.0), (columns.transfer + i, -1.0), (bit, -1.0)], -1.0, np.inf)
            rows.add([(product, 1.0), (bit, -float(low[i]))], 0.0, np.inf)
            compute = float(problem.compute_s[i]) / cutoff_s * (1 << b)
            entries += [(bit, -compute), (product, -float(1 << b))]
        rows.add(entries, 0.0, np.inf)
