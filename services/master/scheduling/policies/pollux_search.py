"""Pollux's search for an allocation matrix (Qiao, thesis, section 3.4.2), written for one core.

The published search mutates, crosses over and repairs 100 matrices for 100 generations. Fitness
has a structure that this one uses: it is a sum over jobs (`fitness.worth`), and a job's term only
depends on how many GPUs it has, of which type, whether they share a machine, and whether it stays
where it is. So the terms are tabulated once a round, and a step costs what it changes.

A population of matrices is kept, between rounds too. Each member is improved by tearing down a few
machines or jobs and building them up again: a torn job goes back to where it runs now, or to where
another member of the population has it (crossover), or gets GPUs by the best gain (per GPU) in
competition with the other torn ones and with some that wait. What is built is kept if the sum of
the terms grew. Capacity, one type per job and interference avoidance (at most one distributed job
on a machine) hold at every step, so nothing is ever repaired.

Waiting is worth so little that it swamps every other term (10^30 of them for p = -10), so waiting
jobs are counted apart, and only the rest is summed.

Pure: the randomness is a seed that the caller passes.
"""

# numba infers the compiled functions' types itself, and its decorators mislead the type checker.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from slackwater.common.native.compiled import njit

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

POPULATION: Final = 4
STEPS: Final = 400
"""Teardowns of each member in a round. Ten times as many gain .01 % (40 jobs, 64 GPUs)."""
TORN_MAX: Final = 28
"""Jobs in one teardown: what three machines of eight GPUs can hold, and some that wait."""
PATIENCE: Final = 100
PATIENCE_A_JOB: Final = 4
"""A member is left alone after PATIENCE + PATIENCE_A_JOB x jobs teardowns in vain."""
WAITING_JOIN: Final = 4
GAIN_MIN: Final = 1e-12


class Problem(NamedTuple):
    """A round in arrays; J jobs, N machines, T GPU types, sizes up to K."""

    free: Ints
    """[N] GPUs of each machine that may be given out."""
    types: Ints
    """[N] type of each machine."""
    worth: Floats
    """[J, T, 2, K + 1] a job's term if it is moved to so many GPUs of a type, on one machine or on
    several. -inf: impossible."""
    stay: Floats
    """[J] its term if it stays on exactly the GPUs that it has."""
    wait: Floats
    """[J] minus a tie-breaker: who is to wait last."""
    base: Ints
    """[J, N] GPUs that it has now."""
    gpus_min: Ints
    gpus_max: Ints
    """[J]"""
    pinned: NDArray[np.bool_]
    """[J] Not to be moved."""
    wait_worth: float
    """The term of a waiting job, the same for all."""
    avoid: bool
    """Interference avoidance."""


class Found(NamedTuple):
    population: Ints
    """[P, J, N]"""
    waiting: Ints
    """[P] jobs without GPUs."""
    rest: Floats
    """[P] the terms of all others."""

    def best(self, wait_worth: float) -> int:
        """The fittest member. Waiting may swamp the rest, which then decides among equals."""
        totals = self.rest + self.waiting * wait_worth
        return min(range(totals.size), key=lambda m: (-totals[m], -self.rest[m], m))


class State(NamedTuple):
    """One member while it is worked on."""

    rows: Ints
    """[J, N]"""
    sizes: Ints
    values: Floats
    """[J] GPUs, and the term without the waiting part."""
    free: Ints
    owner: Ints
    """[N] the distributed job on a machine, or -1 (always, without interference avoidance)."""


def search(problem: Problem, population: Ints, seed: int, steps: int = STEPS) -> Found:
    """Improves every member. A member must hold the pinned jobs' GPUs and break no rule."""
    members = np.ascontiguousarray(population, dtype=np.int64)
    waiting = np.zeros(len(members), dtype=np.int64)
    rest = np.zeros(len(members))
    if problem.base.size:
        random = np.array([seed * 2 + 1], dtype=np.uint64)
        for m in range(len(members)):
            waiting[m], rest[m] = _improve(problem, members, m, random, steps)
    return Found(members, waiting, rest)


@njit(cache=True)
def _next(random):
    """xorshift64*: a float in [0, 1)."""
    x = random[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    random[0] = x
    return np.float64((x * np.uint64(2685821657736338717)) >> np.uint64(11)) / 9007199254740992.0


@njit(cache=True)
def _below(random, n):
    return min(n - 1, int(_next(random) * n))


@njit(cache=True)
def _term(problem, j, row, size):
    """A job's term without the waiting part."""
    if size == 0:
        return problem.wait[j]
    same, nodes, kind = True, 0, 0
    for n in range(row.size):
        if row[n] != problem.base[j, n]:
            same = False
        if row[n] > 0:
            nodes += 1
            kind = problem.types[n]
    if same:
        return problem.stay[j]
    return problem.worth[j, kind, 1 if nodes > 1 else 0, size]


@njit(cache=True)
def _remove(problem, state, j):
    row = state.rows[j]
    for n in range(row.size):
        if row[n] > 0:
            state.free[n] += row[n]
            row[n] = 0
            if state.owner[n] == j:
                state.owner[n] = -1
    state.sizes[j] = 0
    state.values[j] = problem.wait[j]


@njit(cache=True)
def _put(problem, state, j, row):
    nodes, size = 0, 0
    for n in range(row.size):
        if row[n] > 0:
            nodes += 1
    for n in range(row.size):
        state.rows[j, n] = row[n]
        if row[n] > 0:
            state.free[n] -= row[n]
            size += row[n]
            if nodes > 1 and problem.avoid:
                state.owner[n] = j
    state.sizes[j] = size
    state.values[j] = _term(problem, j, row, size)


@njit(cache=True)
def _fits(state, row):
    nodes, clear = 0, True
    for n in range(row.size):
        if row[n] > 0:
            nodes += 1
            if row[n] > state.free[n]:
                return False
            if state.owner[n] >= 0:
                clear = False
    return nodes == 1 or (nodes > 1 and clear)


@njit(cache=True)
def _best_growth(problem, state, j, per_gpu, jitter, target):
    """The best gain, per added GPU or in all, or 0. `target` = (GPUs, 0 one machine | 1 several |
    2 back to where it runs, type). `jitter` disturbs the gain on each type."""
    size = state.sizes[j]
    value = state.values[j] + (problem.wait_worth if size == 0 else 0.0)
    low, high = max(size, 1, problem.gpus_min[j]), problem.gpus_max[j]
    best = 0.0
    gpus = _can_return(problem, state, j)
    if gpus > 0:
        gain = (problem.stay[j] - value) * jitter[0]
        best = gain / max(1, gpus - size) if per_gpu else gain
        target[0], target[1] = gpus, 2
    for kind in range(problem.worth.shape[1]):
        largest, total, open_nodes, open_largest = 0, 0, 0, 0
        for n in range(state.free.size):
            if problem.types[n] != kind:
                continue
            room = state.free[n] + state.rows[j, n]
            largest = max(largest, room)
            if room > 0 and (state.owner[n] < 0 or state.owner[n] == j):
                total += room
                open_nodes += 1
                open_largest = max(open_largest, room)
        for gpus in range(low, min(largest, high) + 1):
            gain = (problem.worth[j, kind, 0, gpus] - value) * jitter[kind]
            if per_gpu:
                gain /= max(1, gpus - size)
            if gain > best:
                best = gain
                target[0], target[1], target[2] = gpus, 0, kind
        if open_nodes > 1:
            for gpus in range(max(low, open_largest + 1), min(total, high) + 1):
                gain = (problem.worth[j, kind, 1, gpus] - value) * jitter[kind]
                if per_gpu:
                    gain /= max(1, gpus - size)
                if gain > best:
                    best = gain
                    target[0], target[1], target[2] = gpus, 1, kind
    return best


@njit(cache=True)
def _can_return(problem, state, j):
    """GPUs that the job runs on, if it is elsewhere now and they are there for it; else 0."""
    gpus, nodes, elsewhere, clear = 0, 0, False, True
    for n in range(state.free.size):
        base, row = problem.base[j, n], state.rows[j, n]
        elsewhere |= base != row
        if base > 0:
            if base > state.free[n] + row:
                return 0
            gpus += base
            nodes += 1
            clear &= state.owner[n] < 0 or state.owner[n] == j
    return gpus if elsewhere and (nodes == 1 or clear) else 0


@njit(cache=True)
def _pick_node(problem, state, j, need, target, row):
    """The tightest machine that holds `need`, else the emptiest; of equals one that j is on."""
    tight, least, wide, most = -1, 1 << 30, -1, 0
    for n in range(row.size):
        if problem.types[n] != target[2] or row[n] > 0:
            continue
        if target[1] == 1 and state.owner[n] >= 0 and state.owner[n] != j:
            continue
        room = state.free[n] + state.rows[j, n]
        here = 1 if state.rows[j, n] > 0 else 0
        if room >= need and 2 * room - here < least:
            tight, least = n, 2 * room - here
        if room > 0 and 2 * room + here > most:
            wide, most = n, 2 * room + here
    return tight if tight >= 0 else wide


@njit(cache=True)
def _grow(problem, state, j, target, row):
    """Lays the target out on machines and moves the job there."""
    row[:] = 0
    need = target[0]
    if target[1] == 2:
        row[:] = problem.base[j]
        need = 0
    while need > 0:
        n = _pick_node(problem, state, j, need, target, row)
        row[n] = min(need, state.free[n] + state.rows[j, n])
        need -= row[n]
    _remove(problem, state, j)
    _put(problem, state, j, row)


@njit(cache=True)
def _build(problem, state, torn, count, per_gpu, noise, random):
    """Gives GPUs to the torn jobs by the best gain until nobody gains."""
    targets = np.zeros((count, 3), dtype=np.int64)
    row = np.zeros(state.free.size, dtype=np.int64)
    jitter = np.ones((count, problem.worth.shape[1]))
    for i in range(count):
        for kind in range(jitter.shape[1]):
            jitter[i, kind] = 1.0 + noise * _next(random)
    while True:
        best, chosen = 0.0, -1
        for i in range(count):
            gain = _best_growth(problem, state, torn[i], per_gpu, jitter[i], targets[i])
            if gain > best:
                best, chosen = gain, i
        if chosen < 0:
            return
        _grow(problem, state, torn[chosen], targets[chosen], row)


@njit(cache=True)
def _add(torn, count, j):
    if count == torn.size:
        return count
    for i in range(count):
        if torn[i] == j:
            return count
    torn[count] = j
    return count + 1


@njit(cache=True)
def _choose(problem, state, torn, random):
    """Choose the jobs to tear down: all on up to three machines, or up to five jobs; and some that
    wait join in, from anywhere in the queue. Returns how many."""
    jobs, nodes = state.rows.shape
    count = 0
    if _next(random) < 0.7:
        for _ in range(1 + _below(random, 3)):
            n = _below(random, nodes)
            for j in range(jobs):
                if state.rows[j, n] > 0 and not problem.pinned[j]:
                    count = _add(torn, count, j)
    else:
        for _ in range(1 + _below(random, 5)):
            j = _below(random, jobs)
            if not problem.pinned[j]:
                count = _add(torn, count, j)
    first, joined = _below(random, jobs), 0
    for k in range(jobs):
        j = (first + k) % jobs
        if state.sizes[j] == 0 and not problem.pinned[j]:
            count = _add(torn, count, j)
            joined += 1
            if joined == WAITING_JOIN:
                break
    return count


@njit(cache=True)
def _put_back(problem, state, torn, count, other, random):
    """Some torn jobs return to where they run, or go where another member has them."""
    style = _next(random)
    if style > 0.8:
        return
    source = problem.base if style < 0.6 else other
    chance = 0.3 + 0.7 * _next(random)
    first = _below(random, count)
    for k in range(count):
        j = torn[(first + k) % count]
        if _next(random) < chance and _fits(state, source[j]):
            _put(problem, state, j, source[j])


@njit(cache=True)
def _open(problem, member):
    """The member as a state, its values worked out."""
    jobs, nodes = member.shape
    state = State(
        member,
        np.zeros(jobs, dtype=np.int64),
        np.zeros(jobs),
        problem.free.copy(),
        np.full(nodes, -1),
    )
    for j in range(jobs):
        _put(problem, state, j, member[j].copy())
    return state


@njit(cache=True)
def _improve(problem, members, m, random, steps):
    """Improves member m in place; answers (jobs waiting, sum of the others' terms)."""
    state = _open(problem, members[m])
    nodes = problem.base.shape[1]
    # Newcomers and freed GPUs meet before anything is torn down.
    everyone = np.flatnonzero(~problem.pinned)
    _build(problem, state, everyone, everyone.size, True, 0.0, random)
    torn = np.zeros(TORN_MAX, dtype=np.int64)
    kept = np.zeros((TORN_MAX, nodes), dtype=np.int64)
    vain, patience = 0, PATIENCE + PATIENCE_A_JOB * everyone.size
    for _ in range(steps):
        vain += 1
        if vain > patience:
            break
        count = _choose(problem, state, torn, random)
        if count == 0:
            continue
        waited, before = 0, 0.0
        for i in range(count):
            j = torn[i]
            kept[i] = state.rows[j]
            before += state.values[j]
            waited += state.sizes[j] == 0
            _remove(problem, state, j)
        other = members[_below(random, members.shape[0])]
        _put_back(problem, state, torn, count, other, random)
        noise = 0.0 if _next(random) < 0.3 else 2.0 * _next(random)
        _build(problem, state, torn, count, _next(random) < 0.8, noise, random)
        wait, after = 0, 0.0
        for i in range(count):
            after += state.values[torn[i]]
            wait += state.sizes[torn[i]] == 0
        gain = after - before
        if wait != waited:
            gain += (wait - waited) * problem.wait_worth
        if gain <= GAIN_MIN:
            for i in range(count):
                _remove(problem, state, torn[i])
            for i in range(count):
                _put(problem, state, torn[i], kept[i])
        else:
            vain = 0
    return np.sum(state.sizes == 0), np.sum(state.values)
