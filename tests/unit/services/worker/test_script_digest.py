"""The digest by which ranks on different code are found."""

from pathlib import Path

from slackwater.services.worker.code import script_digest


def test_a_link_to_nowhere_beside_the_script_changes_nothing(tmp_path: Path) -> None:
    """An editor's lock is such a link; it ended the look at the program with an error."""
    (tmp_path / "train.py").write_text("print(1)")
    program = ("python", "train.py")
    alone = script_digest(program, str(tmp_path))
    assert alone
    (tmp_path / ".#train.py").symlink_to("somebody@somewhere")
    (tmp_path / "gone.py").symlink_to("nowhere.py")
    assert script_digest(program, str(tmp_path)) == alone
