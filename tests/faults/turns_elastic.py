"""An elastic program that takes turns and whose result is known: its executors count their tasks.

`COMPUTES_S`: seconds for which a task keeps the permit to compute; `VALUES`: of its table, which
travel in each iteration.
"""

import os
import time
from typing import Any

import numpy as np

from slackwater import elastic
from slackwater.elastic import Bsp, Table

ITERATIONS, EXECUTORS = int(os.environ["ITERATIONS"]), 2
ROWS = int(os.environ.get("VALUES", "1000")) // 1000


class Counting(elastic.App):
    executors = EXECUTORS
    tables = {"w": Table(ROWS, 1000)}
    driver = Bsp(ITERATIONS)

    class Executor(elastic.Executor):
        def load(self, part: int) -> None:
            self.seen = 0

        def run(self, ctx: Any, task: Any) -> float:
            assert self.seen == task, f"task {task} after {self.seen}"
            self.seen += 1
            values = ctx.get("w")
            time.sleep(float(os.environ.get("COMPUTES_S", "0.005")))
            ctx.update("w", np.ones(values.shape, np.float32))
            return float(values[0, 0])

        def save(self) -> Any:
            return self.seen

        def restore(self, state: Any) -> None:
            self.seen = state

    def finish(self, tables: Any, result: Any) -> Any:
        return {**result, "least": float(tables["w"].min()), "most": float(tables["w"].max())}


if __name__ == "__main__":
    print(elastic.launch(Counting()))
