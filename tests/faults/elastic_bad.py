"""Elastic programs that are wrong, each in its way."""

import os
from typing import Any
from unittest import mock

import numpy as np

from slackwater import elastic
from slackwater.elastic import Ssp, Table, run

WHAT = os.environ["WHAT"]
if WHAT == "file":
    raise KeyError("a column that its data lack")
UPDATES: dict[str, Any] = {
    "shape": lambda ctx: ctx.update("w", np.ones(3)),
    "row": lambda ctx: ctx.update("w", np.ones((1, 2)), rows=[10]),
    "nan": lambda ctx: ctx.update("w", np.full((10, 2), np.nan)),
}


class Raises(Ssp):
    def done(self, run: Any, executor: int, task: Any, result: Any) -> None:
        raise ValueError("its driver gives up")


class Bad(elastic.App):
    executors = 4
    tables = {"w": Table(10, 2)}
    driver = (Raises if WHAT == "driver" else Ssp)(50, staleness=1)

    class Executor(elastic.Executor):
        def run(self, ctx: Any, task: Any) -> float:
            if task == 3:
                UPDATES.get(WHAT, lambda ctx: None)(ctx)
            return 0.0


if __name__ == "__main__":
    if WHAT == "version" and os.environ["SLACKWATER_RANK"] == "1":
        mock.patch.object(run, "release", return_value="0.0.1").start()
    elastic.launch(Bad())
