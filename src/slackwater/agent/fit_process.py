"""FitProcess: fits theta_sys in a process of its own, so that training never waits for a fit.

A fit takes some milliseconds of CPU, and scipy .9 s to import (Qiao, thesis, section 3.4.1: every
30 s). A thread would hold the interpreter's lock for much of it. Here the training thread writes a
line of JSON to a pipe that never blocks, and looks into another one for the answer. The child runs
at a lower priority once it is loaded, and ends with its parent: its input ends then.

    python -m slackwater.agent.fit_process     # the child: a line in, a line out
"""

import logging
import os
import subprocess
import sys
from typing import Final

import msgspec

from slackwater.common.base.errors import Rejected
from slackwater.common.domains.models.adaptive_batch import Wanted
from slackwater.common.domains.models.throughput import ThroughputParams
from slackwater.common.native import blas_threads

_log = logging.getLogger("slackwater.agent")
_READ_BYTES: Final = 1 << 16
_CLOSE_S: Final = 5.0
_NICE: Final = 10
CHILDREN_MAX: Final = 3
"""Children that are started in a program's life: after that it trains on by its last fit."""


class FitProcess:
    """Asks for one fit at a time. The child is started by the first call of `start`."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._read = bytearray()
        self._started = 0
        self.waits = False
        """A fit was asked for, and its answer is not here yet."""

    def start(self) -> None:
        """Start the child; it imports while the program goes on. Takes some milliseconds."""
        self._started += 1
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-m", "slackwater.agent.fit_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, **dict.fromkeys(blas_threads.VARIABLES, "1")},
        )
        for pipe in (self._child.stdin, self._child.stdout):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)

    @property
    def pid(self) -> int | None:
        """The child's; None: there is none."""
        return None if self._child is None else self._child.pid

    def ask(self, wanted: Wanted) -> bool:
        """Hand over what is to be fitted, without waiting. False: the child is still busy, or
        gone."""
        child = self._child
        if child is None or self.waits:
            return False
        assert child.stdin is not None
        line = msgspec.json.encode(wanted) + b"\n"
        try:
            written = os.write(child.stdin.fileno(), line)
            # The pipe is empty and takes 64 KiB; 64 observations are 5 kB.
            assert written == len(line), (written, len(line))
            self.waits = True
        except BrokenPipeError:
            self._lost()
        return self.waits

    def answer(self) -> ThroughputParams | None:
        """Return the fit, once it is there; None: not yet."""
        child = self._child
        if child is None or not self.waits:
            return None
        assert child.stdout is not None
        try:
            data = os.read(child.stdout.fileno(), _READ_BYTES)
        except BlockingIOError:
            return None
        if not data:
            self._lost()
            return None
        self._read += data
        line, newline, rest = self._read.partition(b"\n")
        if not newline:
            return None
        self._read, self.waits = bytearray(rest), False
        return msgspec.json.decode(line, type=ThroughputParams)

    def _lost(self) -> None:
        """Start another child in the place of one that ended, a few times."""
        _log.warning("the process that fits iteration times ended with code %s", self._end())
        if self._started < CHILDREN_MAX:
            self.start()

    def _end(self) -> int | None:
        child, self._child = self._child, None
        if child is None:
            return None
        self.waits, self._read = False, bytearray()
        child.terminate()
        child.communicate(timeout=_CLOSE_S)
        return child.returncode

    def close(self) -> None:
        """End the child. Idempotent."""
        self._end()


def main() -> None:
    """Answer each line of input by a line of output."""
    from slackwater.common.domains.models.fitting import Observation, fit

    # Loads what the first fit would wait for.
    fit([Observation(1, 1, 8, 0, 0.1), Observation(1, 1, 16, 0, 0.15)])
    os.nice(_NICE)
    for line in sys.stdin.buffer:
        wanted = msgspec.json.decode(line, type=Wanted)
        sys.stdout.buffer.write(msgspec.json.encode(fit(wanted.observations, wanted.guess)) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    try:
        main()
    except (Rejected, KeyboardInterrupt) as error:
        sys.exit(f"slackwater: the fit of iteration times ended: {error!r}")
