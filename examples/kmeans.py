"""Mini-batch k-means on scikit-learn's digits: an elastic program.

    slackwater launch examples/kmeans.py
    python examples/kmeans.py       # alone

The table has a row for each centre: the sum of the points that are its own, and their number. Each
task moves a batch of points to their nearest centres; a point's former centre is its executor's
state.
"""

import numpy as np
from sklearn.datasets import load_digits

from slackwater import elastic
from slackwater.elastic import Bsp, Table

CENTRES, EXECUTORS, ITERATIONS = 10, 8, 20
POINTS = load_digits().data.astype(np.float32) / 16.0


def first_centres():
    """Points that are far from one another, each with a weight of one."""
    chosen = [0]
    for _ in range(CENTRES - 1):
        near = ((POINTS[:, None] - POINTS[chosen]) ** 2).sum(2).min(1)
        chosen.append(int(near.argmax()))
    return np.c_[POINTS[chosen], np.ones(CENTRES)]


class KMeans(elastic.App):
    executors = EXECUTORS
    tables = {"centres": Table(CENTRES, POINTS.shape[1] + 1, init=first_centres)}
    driver = Bsp(ITERATIONS)

    class Executor(elastic.Executor):
        def load(self, part):
            mine = POINTS[part::EXECUTORS]
            self.x = np.c_[mine, np.ones(len(mine), np.float32)]
            self.own = np.full(len(mine), -1)

        def run(self, ctx, task):
            sums = ctx.get("centres")
            centres = sums[:, :-1] / sums[:, -1:]
            distances = ((self.x[:, None, :-1] - centres) ** 2).sum(2)
            nearest = distances.argmin(1)
            moved = np.zeros_like(sums)
            np.add.at(moved, nearest, self.x)
            held = self.own >= 0
            np.subtract.at(moved, self.own[held], self.x[held])
            self.own = nearest
            ctx.update("centres", moved)
            return float(distances.min(1).mean())

        def save(self):
            return self.own

        def restore(self, state):
            self.own = state

    def finish(self, tables, result):
        sums = tables["centres"]
        distances = ((POINTS[:, None] - sums[:, :-1] / sums[:, -1:]) ** 2).sum(2)
        return {**result, "inertia": float(distances.min(1).sum())}


if __name__ == "__main__":
    elastic.launch(KMeans())
