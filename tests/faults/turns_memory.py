"""An elastic program of 12 executors of 4 MB each, for jobs that take turns: each counts its tasks.

`READS_S`: seconds that one that was put aside takes to be read; `FILE_BYTES`: the largest file that
it may write, as on a disk without room for more.
"""

import os
import resource
import time
from typing import Any, ClassVar

import numpy as np

from slackwater import elastic
from slackwater.elastic import Bsp, Table, memory

ITERATIONS, EXECUTORS, VALUES = int(os.environ["ITERATIONS"]), 12, 1 << 20
read = memory._Kept.read


def slowly(kept: Any) -> Any:
    time.sleep(float(os.environ.get("READS_S", "0")))
    return read(kept)


memory._Kept.read = slowly  # type: ignore[method-assign]


class Keeping(elastic.App):
    executors = EXECUTORS
    tables: ClassVar = {"w": Table(1, EXECUTORS)}
    driver = Bsp(ITERATIONS)

    class Executor(elastic.Executor):
        def load(self, part: int) -> None:
            self.x = np.full(VALUES, 1.0, np.float32)

        def run(self, ctx: Any, task: Any) -> float:
            time.sleep(0.002)
            ctx.update("w", np.eye(1, EXECUTORS, self.number, np.float32) * self.x[0])
            return float(self.x[-1])

    def finish(self, tables: Any, result: Any) -> Any:
        return {"least": float(tables["w"].min()), "most": float(tables["w"].max())}


if __name__ == "__main__":
    if nbytes := int(os.environ.get("FILE_BYTES", "0")):
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, nbytes))
    elastic.launch(Keeping())
