"""The threads of a slot of several cores: a large fold's chunks are taken by all of them in turn.

One core does not use up a server's memory bandwidth: two folded 100 MB from four workers in two
thirds of the time (benchmarks/kernels.py). Chunks write disjoint elements, so the bits are the
same. A task's CPU time is the sum over its threads, as its slot of several cores counts it.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

Work = Callable[[], bool]


class Team:
    """Helps the thread that calls it. `cpu_s`: what the helpers have used in all."""

    def __init__(self, helpers: int) -> None:
        self.cpu_s = 0.0
        self._helpers = helpers
        self._pool = ThreadPoolExecutor(helpers, thread_name_prefix="kernel-helper")

    def __call__(self, work: Work) -> bool:
        """Do `work` in every thread at once; whether it gave True in all."""
        begun = [self._pool.submit(_timed, work) for _ in range(self._helpers)]
        clean = work()
        for future in begun:
            if not future.cancel():  # One that has not even begun would find nothing left.
                well, cpu_s = future.result()
                clean &= well
                self.cpu_s += cpu_s
        return clean

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def _timed(work: Work) -> tuple[bool, float]:
    begun_s = time.thread_time()
    well = work()
    return well, time.thread_time() - begun_s
