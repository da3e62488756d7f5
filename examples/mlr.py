"""Softmax regression on scikit-learn's digits: an elastic program.

slackwater launch examples/mlr.py --hosts 2:8
slackwater scale mlr --hosts 4
python examples/mlr.py      # alone, without a cluster
"""

import os
import time

import numpy as np
from sklearn.datasets import load_digits

from slackwater import elastic
from slackwater.elastic import Ssp, Table

ITERATIONS = int(os.environ.get("ITERATIONS", "300"))
TASK_S = float(os.environ.get("TASK_S", "0"))
"""Seconds that a task takes at least, for those who want to watch."""


class Mlr(elastic.App):
    executors = 16
    tables = {"w": Table(rows=65, width=10)}
    driver = Ssp(ITERATIONS, staleness=2)

    class Executor(elastic.Executor):
        def load(self, part):
            digits = load_digits()
            images = digits.data[part :: Mlr.executors] / 16.0
            self.x = np.c_[images, np.ones(len(images))].astype(np.float32)
            self.y = np.eye(10, dtype=np.float32)[digits.target[part :: Mlr.executors]]

        def run(self, ctx, task):
            scores = self.x @ ctx.get("w")
            p = np.exp(scores - scores.max(1, keepdims=True))
            p /= p.sum(1, keepdims=True)
            ctx.update("w", -0.5 / Mlr.executors * self.x.T @ (p - self.y) / len(self.x))
            time.sleep(TASK_S)
            return float(-np.log((p * self.y).sum(1)).mean())


if __name__ == "__main__":
    elastic.launch(Mlr())
