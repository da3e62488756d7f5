"""Files of an elastic program beside a checkpoint."""

from pathlib import Path

import pytest

from slackwater.common.base import saved_program
from slackwater.common.base.checkpoint_folder import BUCKETS, CheckpointFolder
from slackwater.common.base.errors import Rejected
from slackwater.schemas.jobs import JobSpec


def put(path: Path) -> None:
    path.write_bytes(b"x")


def checkpoint(folder: Path, iteration: int) -> None:
    folder.mkdir(exist_ok=True)
    CheckpointFolder(folder, BUCKETS).write(iteration, 0, 1, BUCKETS, put)


def program(folder: Path, text: str) -> Path:
    """Files of a run, and of one before it."""
    for run in ("r0", "r1"):
        states = folder / f"run-{run}" / "states"
        states.mkdir(parents=True, exist_ok=True)
        (states / "0-1").write_text(f"{run} {text}")
    (folder / "journal.jsonl").write_text(f'{{"type":"begun","run":"r1"}}\n{text}\n')
    return folder


def test_they_are_found_beside_the_newest_checkpoint_alone(tmp_path: Path) -> None:
    files, folder = program(tmp_path / "elastic", "first"), tmp_path / "saved"
    with pytest.raises(Rejected, match="is missing"):
        saved_program.save(files, folder)
    assert saved_program.saved(folder) is None
    checkpoint(folder, 3)
    assert saved_program.saved(folder) is None
    made = saved_program.save(files, folder)
    assert saved_program.saved(folder) == made == folder / "program-3"
    assert (made / "states" / "0-1").read_text() == "r1 first"
    program(files, "second")
    saved_program.save(files, folder)
    assert (made / "journal.jsonl").read_text().endswith("second\n")
    assert sorted(path.name for path in made.iterdir()) == ["journal.jsonl", "states"]
    checkpoint(folder, 4)
    assert saved_program.saved(folder) is None


def test_a_program_s_folder_follows_from_its_job() -> None:
    assert str(saved_program.own_folder(JobSpec(id="j", folder="/a"))) == "/a/checkpoints/j/elastic"
    given = JobSpec(id="j", folder="/a", checkpoint="/b")
    assert str(saved_program.own_folder(given)) == "/b/elastic"
