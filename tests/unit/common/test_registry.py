"""A registry finds what is ours, what was added, and what somebody else installed."""

from pathlib import Path

import pytest

from slackwater.common.base.errors import ConfigRejected
from slackwater.common.base.registry import Registry


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry[Path]:
    """One of ours, one installed: a module and its entry point, as `pip install` lays them out."""
    (tmp_path / "somebodys_paths.py").write_text("from pathlib import PurePath as Theirs\n")
    info = tmp_path / "somebodys_paths-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: somebodys-paths\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[test.paths]\ntheirs = somebodys_paths:Theirs\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return Registry("path", {"ours": "pathlib:Path"}, "test.paths")


def test_names_are_ours_added_and_installed(registry: Registry[Path]) -> None:
    registry.add("added", Path.cwd)
    assert registry.names() == ["added", "ours", "theirs"]
    assert registry.find("ours") is Path
    assert registry.find("added")() == Path.cwd()
    assert registry.find("theirs").__qualname__ == "PurePath"


def test_an_unknown_name_is_refused_with_those_that_there_are(registry: Registry[Path]) -> None:
    with pytest.raises(ConfigRejected, match="there is no path 'x'; choose one of ours, theirs"):
        registry.find("x")


def test_a_registry_without_a_group_takes_ours_alone() -> None:
    closed: Registry[Path] = Registry("path", {"ours": "pathlib:Path"})
    assert closed.names() == ["ours"]
    with pytest.raises(ConfigRejected, match=r"choose one of ours$"):
        closed.find("theirs")
