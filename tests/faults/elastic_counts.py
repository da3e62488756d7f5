"""An elastic program whose result is known: every task adds to a table of counts, and to one that
is projected, or shrinks by a half with each update of one."""

import os
import time
from typing import Any

import numpy as np

from slackwater import elastic
from slackwater.elastic import NonNegative, Run, SoftThreshold, Ssp, Table

ITERATIONS, EXECUTORS, ROWS = int(os.environ.get("ITERATIONS", "200")), 6, 50
SPARSE = "SPARSE" in os.environ
WIDTH = 300 if SPARSE else 3


class Sized(Ssp):
    """Asks for HOSTS[n] hosts after n + 1 parts of its iterations."""

    hosts = [int(word) for word in os.environ.get("HOSTS", "").split()]

    def done(self, run: Run, executor: int, task: Any, result: Any) -> None:
        before = self._reported
        super().done(run, executor, task, result)
        each = ITERATIONS // (len(self.hosts) + 1)
        if self._reported > before and not self._reported % each and self._reported < ITERATIONS:
            run.use(self.hosts[self._reported // each - 1])


class Counts(elastic.App):
    executors = EXECUTORS
    tables = {
        "n": Table(ROWS, WIDTH, dtype="int32", sparse=SPARSE),
        "last": Table(1, 1, sparse=SPARSE, rule=NonNegative() if SPARSE else SoftThreshold(0.5)),
    }
    driver = Sized(ITERATIONS, staleness=1)

    class Executor(elastic.Executor):
        def load(self, part: int) -> None:
            self.seen: list[int] = []

        def run(self, ctx: Any, task: Any) -> float:
            assert self.seen == [*range(task)], f"task {task} after {self.seen[-3:]}"
            self.seen.append(task)
            rows = [task % ROWS, self.number]
            added = np.zeros((2, WIDTH), np.int32)
            added[:, :3] = [[1, 2, 0], [0, 0, 1]]
            if SPARSE:
                assert ctx.get("n", rows=[self.number])[0, 2] == task, "its own writes"
            else:
                assert ctx.get("n")[:, 0].sum() >= ctx.version
            ctx.update("n", added, rows=rows)
            ctx.update("last", [[0.5 if SPARSE else 1.0]])
            time.sleep(0.004)
            return 1.0 / (1 + task)

        def save(self) -> Any:
            return np.array(self.seen)

        def restore(self, state: Any) -> None:
            self.seen = state.tolist()

    def finish(self, tables: Any, result: Any) -> Any:
        sums, last = tables["n"].sum(0)[:3].tolist(), float(tables["last"][0, 0])
        return {**result, "sums": sums, "last": last}


if __name__ == "__main__":
    print(elastic.launch(Counts()))
