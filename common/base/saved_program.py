"""An elastic program's own files beside a checkpoint of its tables, by which it goes on.

    FOLDER/program-ITERATION/journal.jsonl      its driver's journal
    FOLDER/program-ITERATION/states/            states of its executors

They are of a program that is paused: then each executor's state is with the driver, and the tables
have what was told, and nothing else.
"""

import json
import shutil
from pathlib import Path
from typing import Final

from slackwater.common.base.checkpoint_folder import make_durable, newest_of_buckets
from slackwater.common.base.errors import Rejected
from slackwater.schemas.jobs import JobSpec

JOURNAL: Final = "journal.jsonl"
STATES: Final = "states"
ANY_MARK: Final = "mark-*"
"""Matches folders of marks (elastic/marks.py)."""


def own_folder(spec: JobSpec) -> Path:
    """Return where the program of a job has its files, as seen from its nodes."""
    return Path(spec.checkpoint or Path(spec.folder, "checkpoints", spec.id)) / "elastic"


def save(program: Path, folder: Path) -> Path:
    """Copy a paused program's files beside the newest checkpoint in `folder`; return where they
    are. Raises Rejected, OSError."""
    made = _beside(folder)
    with (program / JOURNAL).open("rb") as file:
        run = json.loads(file.readline())["run"]
    draft = made.with_name(f"{made.name}.new")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    shutil.copy(program / JOURNAL, draft)
    states = program / f"run-{run}" / STATES
    if states.is_dir():
        shutil.copytree(states, draft / STATES)
    for path in (*draft.rglob("*"), draft):
        make_durable(path)
    shutil.rmtree(made, ignore_errors=True)
    draft.rename(made)
    make_durable(folder)
    return made


def saved(folder: Path) -> Path | None:
    """Return the program's files beside the newest checkpoint in `folder`; None: it has none, or
    the folder is not seen from here."""
    try:
        found = _beside(folder)
    except Rejected:  # Aggregators say what is wrong with it.
        return None
    return found if (found / JOURNAL).is_file() else None


def newest_mark(folder: Path) -> Path | None:
    """Return the folder of the newest whole mark in a job's `save_to`; None: there is none."""
    marks = {mark: saved(mark) for mark in folder.glob(ANY_MARK)}
    made_s = {mark: made.stat().st_mtime for mark, made in marks.items() if made is not None}
    return max(made_s, key=made_s.__getitem__) if made_s else None


def _beside(folder: Path) -> Path:
    return folder / f"program-{newest_of_buckets(folder)[0].iteration}"
