"""An elastic program that goes by 3 % of what is left towards a known minimum, in two tables that
are buckets of their own: how much of its way was lost can be read off the end."""

import os
import time
from typing import Any

import numpy as np

from slackwater import elastic
from slackwater.elastic import Ssp, Table

STEP, TASK_S = 0.03, 0.02
ITERATIONS, EXECUTORS, ROWS, WIDTH = int(os.environ["ITERATIONS"]), 4, 300, 1000


class Quadratic(elastic.App):
    executors = EXECUTORS
    tables = {name: Table(ROWS, WIDTH, sparse="SPARSE" in os.environ) for name in "ab"}
    driver = Ssp(ITERATIONS, staleness=1)

    class Executor(elastic.Executor):
        def load(self, part: int) -> None:
            self.rows = range(part, ROWS, EXECUTORS)

        def run(self, ctx: Any, task: Any) -> float:
            left = 0.0
            for name in "ab":
                towards = 1.0 - ctx.get(name, rows=self.rows)
                ctx.update(name, STEP * towards, rows=self.rows)
                left += float(np.square(towards).mean())
            time.sleep(TASK_S)
            return left

    def finish(self, tables: Any, result: Any) -> Any:
        return {name: float((1.0 - table).mean()) for name, table in tables.items()}


if __name__ == "__main__":
    print(elastic.launch(Quadratic()))
