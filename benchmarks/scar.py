"""Measure what a partial failure costs in iterations (SCAR: Qiao 2021, section 5.5).

A model is a list of units (rows of a matrix with what belongs to them, or a network's layers):
placed, lost and saved one by one. A trial trains, loses a random part p of the units at a random
iteration, takes them (for full recovery: all) from the running checkpoint, and trains on until the
loss is that of the same run undisturbed after 60 iterations. Rework is how many iterations later
that is. Batches follow the iteration's number, so that a run is compared with itself; crossings are
interpolated.

    python benchmarks/scar.py [--models mlr-digits mlr-mnist mf cnn cnn-layers] [--trials 30]

*Partial* (figures 5.7, 5.8): a full checkpoint every C = 8 iterations; p = 1/4, 1/2, 3/4. 59 to 89,
31 to 62 and 12 to 42 % less than full recovery are published. *Priority* (figures 5.9, 5.10): an
eighth of the units every iteration, p = 1/2; those that changed most, in turn, or at random. For
the first, 78 to 95 % less is published; rows that change alike give less, so the goals are ours.
`histogram` is what aggregators and their controller do (common/domains/slots/saved_pieces.py);
`priority` sorts all distances, as the paper does; `rounded` chooses as `histogram`, but twice as
many, as bfloat16 (`--save-dtype`). *Copies*: lost units come from a worker's copy, one iteration
old.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from figures import Figure, Row, show, this_command, write_json
from numpy.typing import NDArray
from sklearn.datasets import load_digits

from slackwater.common.domains.slots.rules import narrow, widen
from slackwater.common.domains.slots.saved_pieces import chosen, histogram, threshold

C: Final = 8
"""Iterations between two full checkpoints."""
AT: Final = 60
MOST: Final = 240
FRACTION: Final = 1 / 8
Array = NDArray[Any]
State = list[Array]
"""Arrays whose first axes are the units, one after another."""
LOST: Final = {0.25: (59, 89), 0.5: (31, 62), 0.75: (12, 42)}
"""Part lost -> published reduction of rework by partial recovery, in per cent."""
PRIORITY: Final = {"mlr-mnist": 0.70, "mlr-digits": 0.65}
COPIES: Final = {"mlr-mnist": 0.78, "mlr-digits": 0.78, "cnn": 0.78, "cnn-layers": 0.78}
"""Model -> the reduction that is the goal; others are printed."""
SHARED: Final = Path(os.environ.get("SLACKWATER_DATA", Path(__file__).parents[2] / "shared/data"))


class Model(Protocol):
    name: str

    def begin(self, seed: int) -> State:
        """Return the initial state, and remember the seed of the batches."""

    def step(self, state: State, iteration: int) -> State:
        """Return the state after one more iteration."""

    def loss(self, state: State) -> float: ...


class Softmax:
    """Softmax regression by mini-batches; a unit is a row of (features + 1, classes)."""

    def __init__(self, name: str, x: Array, y: Array, rate: float) -> None:
        self.name, self.rate = name, rate
        self.x, self.y = np.hstack([x, np.ones((len(x), 1))]).astype(np.float32), y
        self.targets = np.eye(int(y.max()) + 1, dtype=np.float32)[y]
        self.batch = len(y) // 6
        self.seed = 0

    def begin(self, seed: int) -> State:
        self.seed = seed
        return [np.zeros((self.x.shape[1], self.targets.shape[1]), np.float32)]

    def _probabilities(self, rows: Array, w: Array) -> Array:
        z = rows @ w
        z = np.exp(z - z.max(1, keepdims=True))
        return np.asarray(z / z.sum(1, keepdims=True))

    def step(self, state: State, iteration: int) -> State:
        order = np.random.default_rng((self.seed, iteration // 6)).permutation(len(self.y))
        some = order[iteration % 6 * self.batch : (iteration % 6 + 1) * self.batch]
        error = self._probabilities(self.x[some], state[0]) - self.targets[some]
        return [state[0] - np.float32(self.rate / len(some)) * (self.x[some].T @ error)]

    def loss(self, state: State) -> float:
        p = self._probabilities(self.x, state[0])
        return float(-np.log(p[np.arange(len(self.y)), self.y] + 1e-12).mean())


class Factors:
    """Alternating least squares on a noisy matrix of low rank, seen at places as unevenly popular
    as films are; a unit is a row of either factor."""

    name = "mf"
    rank, shape, share, noise, ridge = 20, (330, 900), 0.06, 0.3, 0.05

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        m, n = self.shape
        popular = [rng.lognormal(0, s, size) for s, size in ((1.0, m), (1.5, n))]
        chance = np.outer(*(p / p.sum() for p in popular)).reshape(-1)
        cells = rng.choice(m * n, int(m * n * self.share), replace=False, p=chance)
        self.u, self.v = cells // n, cells % n
        a, b = rng.normal(size=(m, self.rank)), rng.normal(size=(n, self.rank))
        clean = (a[self.u] * b[self.v]).sum(1) / self.rank**0.5 + 3.5
        self.r = clean + rng.normal(size=cells.size) * self.noise
        self.of_u = [np.flatnonzero(self.u == each) for each in range(m)]
        self.of_v = [np.flatnonzero(self.v == each) for each in range(n)]

    def begin(self, seed: int) -> State:
        return [np.random.default_rng(seed).random((sum(self.shape), self.rank))]

    def step(self, state: State, iteration: int) -> State:
        w, m = state[0].copy(), self.shape[0]
        sides = ((self.of_u, self.v, w[:m], w[m:]), (self.of_v, self.u, w[m:], w[:m]))
        for cells, others, mine, theirs in sides:
            for row, seen in enumerate(cells):
                if seen.size:
                    x = theirs[others[seen]]
                    gram = x.T @ x + self.ridge * seen.size * np.eye(self.rank)
                    mine[row] = np.linalg.solve(gram, x.T @ self.r[seen])
        return [w]

    def loss(self, state: State) -> float:
        m = self.shape[0]
        found = (state[0][self.u] * state[0][m + self.v]).sum(1)
        return float(((found - self.r) ** 2).mean())


class Network:
    """Two convolutions and three dense layers on digits, Adam; an iteration is four batches of 64.
    A unit is a shard, a row of a tensor's first axis with its moments, or a whole layer."""

    def __init__(self, *, by_layer: bool = False) -> None:
        import torch
        from torch import nn

        torch.set_num_threads(1)
        self.torch = torch
        digits = load_digits()
        self.x = torch.tensor(digits.images / 16, dtype=torch.float32)[:, None]
        self.y = torch.tensor(digits.target)
        self.net = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10),
        )  # fmt: skip
        self.parameters = list(self.net.parameters())
        self.name = "cnn-layers" if by_layer else "cnn"
        layers = [at // 2 for at, each in enumerate(self.parameters) for _ in range(len(each))]
        self.unit_of_row = np.array(layers) if by_layer else None
        self.seed = 0

    def begin(self, seed: int) -> State:
        self.seed = seed
        self.torch.manual_seed(seed)
        for layer in self.net:
            if hasattr(layer, "reset_parameters"):
                layer.reset_parameters()
        values = [p.detach().numpy().copy() for p in self.parameters]
        return [np.stack([v, np.zeros_like(v), np.zeros_like(v)], axis=1) for v in values]

    def _load(self, state: State) -> None:
        for parameter, each in zip(self.parameters, state, strict=True):
            parameter.data.copy_(self.torch.from_numpy(np.ascontiguousarray(each[:, 0])))

    def step(self, state: State, iteration: int) -> State:
        self._load(state)
        after = [each.copy() for each in state]
        for number in range(4 * iteration + 1, 4 * iteration + 5):
            some = np.random.default_rng((self.seed, number)).integers(0, len(self.y), 64)
            self.net.zero_grad()
            loss = self.torch.nn.functional.cross_entropy(self.net(self.x[some]), self.y[some])
            loss.backward()
            for parameter, each in zip(self.parameters, after, strict=True):
                g = parameter.grad.numpy()
                each[:, 1] = 0.9 * each[:, 1] + 0.1 * g
                each[:, 2] = 0.999 * each[:, 2] + 0.001 * g * g
                m = each[:, 1] / (1 - 0.9**number)
                v = np.sqrt(each[:, 2] / (1 - 0.999**number))
                each[:, 0] -= 0.001 * m / (v + 1e-8)
            self._load(after)
        return after

    def loss(self, state: State) -> float:
        self._load(state)
        with self.torch.no_grad():
            return float(self.torch.nn.functional.cross_entropy(self.net(self.x), self.y))


def digits() -> Softmax:
    found = load_digits()
    return Softmax("mlr-digits", found.data / 16, found.target, 0.3)


def mnist() -> Softmax:
    """540 images of MNIST, of which a third of the pixels never changes. Raises OSError."""
    lines = (SHARED / "cruise-samples/sample_mlr").read_text().splitlines()
    rows = [line.split() for line in lines if line.strip() and not line.startswith("#")]
    x = np.zeros((len(rows), 784), np.float32)
    for at, row in enumerate(rows):
        for pair in row[1:]:
            column, _, value = pair.partition(":")
            x[at, int(column)] = float(value)
    return Softmax("mlr-mnist", x, np.array([int(row[0]) for row in rows]), 0.1)


# Units --------------------------------------------------------------------------------------------


def unit_of_row(model: Model, state: State) -> Array:
    """Return the unit of each row of the state: each is one by itself, unless the model says."""
    known = getattr(model, "unit_of_row", None)
    return np.arange(sum(len(each) for each in state)) if known is None else known


def far(a: State, b: State, owner: Array) -> Array:
    """Return each unit's distance; of one with moments, that of its parameters."""
    found = []
    for x, y in zip(a, b, strict=True):
        own = (x - y)[:, 0] if x.ndim > 2 else x - y
        found.append((own.reshape(len(own), -1) ** 2).sum(1))
    return np.sqrt(np.bincount(owner, np.concatenate(found)))


def mixed(state: State, saved: State, which: Array, owner: Array) -> State:
    """Return the state with these units taken from `saved`."""
    lost = np.isin(owner, which)
    made, at = [], 0
    for mine, old in zip(state, saved, strict=True):
        rows = lost[at : at + len(mine)].reshape(-1, *(1,) * (mine.ndim - 1))
        made.append(np.where(rows, old, mine))
        at += len(mine)
    return made


# Trials -------------------------------------------------------------------------------------------


def converged(model: Model, state: State, at: int, wanted: float) -> tuple[float, list[State]]:
    """Return after how many iterations, a fraction, the loss is the wanted one, and the states on
    the way."""
    before, states = np.inf, [state]
    now = model.loss(state)
    while now > wanted and at < MOST:
        state = model.step(state, at)
        at += 1
        states.append(state)
        before, now = now, model.loss(state)
    back = (wanted - now) / (before - now) if before < np.inf and before > now else 0.0
    return at - back, states


def running(
    states: Sequence[State], failed: int, fraction: float, how: str, rng: Any, owner: Array
) -> State:
    """Return the running checkpoint when the iteration after `failed` fails."""
    saved, every = states[0], max(1, round(fraction * C))
    exact = saved
    count = int(owner[-1]) + 1
    take, turn = max(1, round(fraction * count)), 0
    for at in range(every, failed + 1, every):
        if fraction == 1.0:
            which: Array = np.arange(count)
        elif how == "priority":
            which = np.argsort(-far(states[at], saved, owner), kind="stable")[:take]
        elif how in ("histogram", "rounded"):
            found = far(states[at], exact, owner)
            part = fraction * (2.0 if how == "rounded" else 1.0)
            which = chosen(found, *threshold(histogram(found).tolist(), part))
        elif how == "round":
            which, turn = np.arange(turn, turn + take) % count, turn + take
        else:
            which = rng.choice(count, take, replace=False)
        exact = mixed(exact, states[at], which, owner)
        news = rounded(states[at]) if how == "rounded" else states[at]
        saved = mixed(saved, news, which, owner)
    return saved


def rounded(state: State) -> State:
    """Return the state as bfloat16 has it."""
    return [widen(narrow(each.astype(np.float32))) for each in state]


def experiment(model: Model, trials: int) -> list[Row]:
    rework: dict[Any, list[float]] = {"full": []}
    runs: dict[int, tuple[float, float, list[State]]] = {}
    for trial in range(trials):
        rng, seed = np.random.default_rng(1000 + trial), trial % 10
        if seed not in runs:
            state = model.begin(seed)
            for iteration in range(AT):
                state = model.step(state, iteration)
            wanted = model.loss(state)
            runs[seed] = wanted, *converged(model, model.begin(seed), 0, wanted)
        wanted, base, states = runs[seed]
        model.begin(seed)
        failed = 0
        while not C <= failed < base - 1:
            failed = int(rng.geometric(2 / base))
        owner, here = unit_of_row(model, states[0]), states[failed]
        count = int(owner[-1]) + 1

        def cost(
            saved: State, which: Array, *, of: Any = (here, failed, wanted, base, owner)
        ) -> float:
            state, at, loss, undisturbed, units = of
            return converged(model, mixed(state, saved, which, units), at, loss)[0] - undisturbed

        last = running(states, failed, 1.0, "priority", rng, owner)
        rework["full"].append(cost(last, np.arange(count)))
        for part in LOST:
            lost = rng.choice(count, round(part * count), replace=False)
            rework.setdefault(part, []).append(cost(last, lost))
        half = rng.choice(count, count // 2, replace=False)
        for how in ("histogram", "rounded", "priority", "round", "random"):
            saved = running(states, failed, FRACTION, how, rng, owner)
            rework.setdefault(how, []).append(cost(saved, half))
        rework.setdefault("copies", []).append(cost(states[failed - 1], half))
    return rows_of(model.name, trials, {name: float(np.mean(v)) for name, v in rework.items()})


def rows_of(name: str, trials: int, mean: dict[Any, float]) -> list[Row]:
    full = mean["full"]
    rows: list[Row] = []
    for part, (low, high) in LOST.items():
        rows.append(
            Figure(
                f"{name}: rework of partial recovery, {part:g} lost ({trials} trials; published: "
                f"{low} to {high} % less)", mean[part], full, "iterations", "full recovery",
                1 - low / 100, lower_is_better=True,
            )
        )  # fmt: skip
    for how in ("histogram", "rounded", "priority", "round", "random", "copies"):
        goals = COPIES if how in ("copies", "rounded") else PRIORITY if how == "histogram" else {}
        goal = 1 - goals[name] if name in goals else None
        rows.append(
            Figure(
                f"{name}: rework, half lost, an eighth saved at a time: {how}" if how != "copies"
                else f"{name}: rework, half lost, from a worker's copies, an iteration old",
                mean[how], full, "iterations", "full recovery", goal, lower_is_better=True,
            )
        )  # fmt: skip
    return rows


MODELS: Final = {
    "mlr-digits": digits,
    "mlr-mnist": mnist,
    "mf": Factors,
    "cnn": Network,
    "cnn-layers": lambda: Network(by_layer=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=[*MODELS], default=[*MODELS])
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[Row] = []
    for name in options.models:
        model: Any = MODELS[name]()
        rows += experiment(model, options.trials)
    show("rework after partial failures", rows)
    if options.json is not None:
        write_json(options.json, this_command(), rows)


if __name__ == "__main__":
    main()
