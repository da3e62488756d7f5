"""Matrix factorization of ratings by SGD: an elastic program.

    slackwater launch examples/mf.py
    python examples/mf.py       # alone

Ratings are drawn from a model of rank 8 with noise of .1, so that the best error is known. Users
are divided among executors, whose state their factors are; those of items are the table.
"""

import numpy as np

from slackwater import elastic
from slackwater.elastic import Ssp, Table

USERS, ITEMS, RANK, RATINGS, EXECUTORS = 800, 400, 8, 60_000, 8
RATE, NOISE = 0.03, 0.1


def ratings():
    """(users, items, ratings); the last tenth is held out."""
    rng = np.random.default_rng(1)
    left, right = rng.normal(0, RANK**-0.25, (2, max(USERS, ITEMS), RANK))
    users, items = rng.integers(0, USERS, RATINGS), rng.integers(0, ITEMS, RATINGS)
    values = (left[users] * right[items]).sum(1) + rng.normal(0, NOISE, RATINGS)
    return users, items, values.astype(np.float32)


def first_items():
    return np.random.default_rng(2).normal(0, 0.3, (ITEMS, RANK))


class Factorization(elastic.App):
    executors = EXECUTORS
    tables = {"items": Table(ITEMS, RANK, init=first_items)}
    driver = Ssp(60, staleness=1)

    class Executor(elastic.Executor):
        def load(self, part):
            users, items, values = (each[: RATINGS * 9 // 10] for each in ratings())
            mine = users % EXECUTORS == part
            self.users, self.items, self.values = (
                users[mine] // EXECUTORS,
                items[mine],
                values[mine],
            )
            rng = np.random.default_rng(100 + part)
            self.left = rng.normal(0, 0.3, (USERS // EXECUTORS, RANK)).astype(np.float32)

        def run(self, ctx, task):
            right, first, squares = ctx.get("items"), None, 0.0
            first = right.copy()
            order = np.random.default_rng(1000 * task + self.number).permutation(len(self.values))
            for batch in np.array_split(order, 40):
                u, i = self.users[batch], self.items[batch]
                error = self.values[batch] - (self.left[u] * right[i]).sum(1)
                squares += float((error**2).sum())
                step = RATE * error[:, None]
                moved = step * right[i], step * self.left[u]
                np.add.at(self.left, u, moved[0])
                np.add.at(right, i, moved[1])
            ctx.update("items", (right - first) / 2)  # Others move them in the same direction.
            return (squares / len(order)) ** 0.5

        def save(self):
            return self.left

        def restore(self, state):
            self.left = state


if __name__ == "__main__":
    elastic.launch(Factorization())
