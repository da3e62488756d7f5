"""What every test may use: the shared traces' folder, where there is one."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def traces_dir() -> Path:
    """The folder of public job traces; the test is skipped where it is absent."""
    folder = Path(os.environ.get("SLACKWATER_TRACES", ROOT.parent / "shared" / "traces"))
    if not folder.is_dir():
        pytest.skip(f"the trace folder is absent ({folder}); set SLACKWATER_TRACES")
    return folder
