"""The example notebook runs from its first cell to its last, in a kernel of its own."""

import shutil
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[3]


@pytest.mark.live
async def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes some seconds: a kernel, a cluster and five jobs."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for name in ("SLACKWATER_URL", "NATS_URL", "SLACKWATER_CLUSTER"):
        monkeypatch.delenv(name, raising=False)
    shutil.copy(ROOT / "examples" / "client.ipynb", tmp_path)
    notebook: Any = nbformat.read(tmp_path / "client.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "it is kept without outputs"
    await NotebookClient(
        notebook, timeout=100, resources={"metadata": {"path": str(tmp_path)}}
    ).async_execute()
    said = ["".join(str(each) for each in cell.get("outputs", ())) for cell in notebook.cells]
    assert "'step 2 of rank 1'" in "".join(said)
    assert any("completed" in text for text in said)
    assert "3.0" in said[-3], said
