"""Non-negative factorization of a matrix of which some entries are known: an elastic program.

    slackwater launch examples/nmf.py
    python examples/nmf.py       # alone

The entries are drawn from factors of rank 6 that are sparse and not negative, with noise of .05, so
that the best error is known. Rows are divided among executors, whose state their factors are, as in
Cruise (Lee 2020, section 3.4.1); the factors of columns are the table. Its rule keeps them from
going below 0: max(0, x + d).
"""

import numpy as np

from slackwater import elastic
from slackwater.elastic import NonNegative, Ssp, Table

ROWS, COLUMNS, RANK, ENTRIES, EXECUTORS = 600, 300, 6, 60_000, 8
RATE, NOISE = 0.05, 0.05


def entries():
    """(rows, columns, values); the last tenth is held out."""
    rng = np.random.default_rng(1)
    left, right = (
        rng.gamma(1.0, 0.5, (n, RANK)) * (rng.random((n, RANK)) < 0.6) for n in (ROWS, COLUMNS)
    )
    rows, columns = rng.integers(0, ROWS, ENTRIES), rng.integers(0, COLUMNS, ENTRIES)
    values = (left[rows] * right[columns]).sum(1) + rng.normal(0, NOISE, ENTRIES)
    return rows, columns, values.astype(np.float32)


def first_columns():
    return np.random.default_rng(2).random((COLUMNS, RANK)) * 0.5


class Nmf(elastic.App):
    executors = EXECUTORS
    tables = {"columns": Table(COLUMNS, RANK, init=first_columns, rule=NonNegative())}
    driver = Ssp(120, staleness=1)

    class Executor(elastic.Executor):
        def load(self, part):
            rows, columns, values = entries()
            known = np.arange(ENTRIES) < ENTRIES * 9 // 10
            mine = rows % EXECUTORS == part
            self.known, self.held_out = (
                (rows[which] // EXECUTORS, columns[which], values[which])
                for which in (mine & known, mine & ~known)
            )
            rng = np.random.default_rng(100 + part)
            self.left = rng.random((ROWS // EXECUTORS, RANK)).astype(np.float32) * 0.5

        def run(self, ctx, task):
            right = ctx.get("columns")
            first, (rows, columns, values) = right.copy(), self.known
            order = np.random.default_rng(1000 * task + self.number).permutation(len(values))
            for batch in np.array_split(order, 40):
                u, i = rows[batch], columns[batch]
                step = RATE * (values[batch] - (self.left[u] * right[i]).sum(1))[:, None]
                moved = step * right[i], step * self.left[u]
                np.add.at(self.left, u, moved[0])
                np.add.at(right, i, moved[1])
                np.maximum(self.left, 0.0, out=self.left)
                np.maximum(right, 0.0, out=right)
            ctx.update("columns", (right - first) / 2)  # Others move them in the same direction.
            rows, columns, values = self.held_out
            return float(
                np.sqrt(((values - (self.left[rows] * right[columns]).sum(1)) ** 2).mean())
            )

        def save(self):
            return self.left

        def restore(self, state):
            self.left = state

    def finish(self, tables, result):
        return {**result, "least": float(tables["columns"].min())}


if __name__ == "__main__":
    elastic.launch(Nmf())
