"""Marks of a program: all of it, saved at one instant, to which its job goes back after a loss.

    SAVE_TO/mark-VERSION-ID/              tables, as aggregators save them
    SAVE_TO/mark-VERSION-ID/program-N/    the driver's journal and executors' states

The driver takes all executors back, each after its task. Then the tables hold what was told and
nothing else (Qiao 2021, section 4.3.2), aggregators save them, and the driver's own files are
copied beside. The mark counts once the master has it; the one before is removed after that.
"""

import contextlib
import os
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Final

from slackwater.agent.table_agent import TableAgent
from slackwater.common.base.checkpoint_folder import make_durable
from slackwater.common.base.errors import Rejected, Retryable
from slackwater.common.base.saved_program import ANY_MARK
from slackwater.elastic.server import DriverServer
from slackwater.schemas.jobs import SAVE_EVERY_VARIABLE, SAVE_TO_VARIABLE

HOLD_S: Final = 30.0
"""Seconds that a mark may wait for tasks that run, and for hosts that are started again."""
SAVE_S: Final = 60.0
"""Seconds that the program may stand still while it is saved."""
POLL_S: Final = 0.02


class Marks:
    """Lives in rank 0, in the program's own thread."""

    def __init__(
        self, agent: TableAgent, server: DriverServer, folder: Path, every_s: float
    ) -> None:
        self._agent, self._server, self._folder, self._every_s = agent, server, folder, every_s
        none = server.core.version == 0 or not any(folder.glob(ANY_MARK))
        self._due_s = time.monotonic() + (0.0 if none else every_s)
        self._held_s: float | None = None
        """Since when the program is to hold still; None: it runs."""

    @classmethod
    def wanted(
        cls, agent: TableAgent, server: DriverServer, environment: Mapping[str, str]
    ) -> "Marks | None":
        """Return those of a job whose user wants that; None: they do not."""
        if not (folder := environment.get(SAVE_TO_VARIABLE)):
            return None
        return cls(agent, server, Path(folder), float(environment[SAVE_EVERY_VARIABLE]))

    @property
    def due(self) -> bool:
        """Say whether the program is held, to be saved."""
        return self._held_s is not None and self._server.held

    def look(self, meanwhile: Callable[[], None]) -> None:
        """Do what is due; `meanwhile` is called while the program is saved. Returns soon, but for
        that."""
        now_s = time.monotonic()
        if self._held_s is None:
            if now_s >= self._due_s and self._server.finish is None:
                self._held_s = now_s
                self._server.hold()
        elif self._server.held:
            self._take(meanwhile)
        elif now_s - self._held_s > HOLD_S:
            self._go_on(f"not all tasks ended within {HOLD_S:g} s")

    def _take(self, meanwhile: Callable[[], None]) -> None:
        name = f"mark-{self._server.core.version}-{secrets.token_hex(4)}"
        folder = self._folder / name
        try:
            _make(folder)
            self._save(name, meanwhile)
            self._server.save_beside(folder, SAVE_S)
            self._agent.keep_mark(name)
        except OSError as error:
            self._go_on(f"{folder}: {error.strerror or error}")
        except (Retryable, Rejected, CancelledError) as error:
            self._go_on(str(error) or "the driver ended")
        else:
            self._go_on("")
            self._remove_all_but(name)

    def _save(self, name: str, meanwhile: Callable[[], None]) -> None:
        """Return once the tables are durable. Raises Retryable, Rejected, TimeoutError."""
        until_s = time.monotonic() + SAVE_S
        while (made := self._agent.save_mark(name)).phase != "done":
            if made.phase == "failed":
                raise Rejected(made.reason)
            if time.monotonic() > until_s:
                raise TimeoutError(f"tables were not saved within {SAVE_S:g} s")
            meanwhile()
            time.sleep(POLL_S)

    def _go_on(self, why_not: str) -> None:
        """Let the program run. `why_not`: the reason for which a new mark is missing."""
        self._held_s = None
        self._due_s = time.monotonic() + self._every_s
        self._server.release()
        if why_not:
            sys.stderr.write(f"slackwater: no mark in {self._folder}: {why_not}\n")
            sys.stderr.flush()

    def _remove_all_but(self, name: str) -> None:
        for other in self._folder.glob(ANY_MARK):
            if other.name != name:
                shutil.rmtree(other, ignore_errors=True)


def _make(folder: Path) -> None:
    """Make a mark's folder, in which all may write who may in the one above. Raises OSError."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir()
    with contextlib.suppress(PermissionError):  # It is on a file system that has no modes.
        os.chmod(folder, folder.parent.stat().st_mode & 0o7777)
    make_durable(folder.parent)
