"""An elastic program whose result is known: every task adds to a table of counts."""

import os
import time
from typing import Any

import numpy as np

from slackwater import elastic
from slackwater.elastic import Ssp, Table

ITERATIONS, EXECUTORS, ROWS = int(os.environ.get("ITERATIONS", "200")), 6, 50


class Counts(elastic.App):
    executors = EXECUTORS
    tables = {"n": Table(ROWS, 3, dtype="int32"), "last": Table(1, 1)}
    driver = Ssp(ITERATIONS, staleness=1)

    class Executor(elastic.Executor):
        def load(self, part: int) -> None:
            self.seen: list[int] = []

        def run(self, ctx: Any, task: Any) -> float:
            assert self.seen == [*range(task)], f"task {task} after {self.seen[-3:]}"
            self.seen.append(task)
            rows = [task % ROWS, self.number]
            assert ctx.get("n")[:, 0].sum() >= ctx.version
            ctx.update("n", [[1, 2, 0], [0, 0, 1]], rows=rows)
            ctx.update("last", [[0.5]])
            time.sleep(0.004)
            return 1.0 / (1 + task)

        def save(self) -> Any:
            return np.array(self.seen)

        def restore(self, state: Any) -> None:
            self.seen = state.tolist()

    def finish(self, tables: Any, result: Any) -> Any:
        return {**result, "sums": tables["n"].sum(0).tolist(), "last": float(tables["last"][0, 0])}


if __name__ == "__main__":
    print(elastic.launch(Counts()))
