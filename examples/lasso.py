"""The Lasso by proximal gradient descent on scikit-learn's diabetes: an elastic program.

    slackwater launch examples/lasso.py --hosts 1:4
    python examples/lasso.py    # alone

Minimises |y - Xw|^2 / 2n + ALPHA |w|_1. A task gives the gradient of its part of the data; the
table's rule takes the threshold off, a share for each of the updates that make an iteration.
"""

import numpy as np
from sklearn.datasets import load_diabetes

from slackwater import elastic
from slackwater.elastic import Bsp, SoftThreshold, Table

EXECUTORS, ALPHA = 8, 0.1


def data():
    """X with columns of mean 0 and deviation 1, and y of mean 0."""
    x, y = load_diabetes(return_X_y=True)
    return (x - x.mean(0)) / x.std(0), (y - y.mean()) / y.std()


def rate():
    x, _ = data()
    return len(x) / np.linalg.norm(x, 2) ** 2


class Lasso(elastic.App):
    executors = EXECUTORS
    tables = {"w": Table(10, 1, rule=SoftThreshold(rate() * ALPHA / EXECUTORS))}
    driver = Bsp(400)

    class Executor(elastic.Executor):
        def load(self, part):
            x, y = data()
            self.x, self.y, self.all = x[part::EXECUTORS], y[part::EXECUTORS], len(x)
            self.rate = rate()

        def run(self, ctx, task):
            w = ctx.get("w")
            left = self.y - self.x @ w[:, 0]
            ctx.update("w", self.rate / self.all * (self.x.T @ left)[:, None])
            ours = (left**2).sum() / 2 / self.all + ALPHA * np.abs(w).sum() / EXECUTORS
            return float(ours) * EXECUTORS

    def finish(self, tables, result):
        return {**result, "w": tables["w"][:, 0].tolist()}


if __name__ == "__main__":
    print(elastic.launch(Lasso()))
