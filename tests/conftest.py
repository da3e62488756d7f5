"""Fixtures for every test: the shared traces' folder, where there is one."""

import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes says nothing on a shared machine.
settings.register_profile("slackwater", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("slackwater")

# Fitting solves many tiny systems: threads of the linear algebra only stand in each other's way.
# Set before anything imports numpy.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# A shell without job control starts its background with SIGINT ignored, and so do those whom that
# starts: a command that a test interrupts would go on for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parent.parent


def public_traces() -> Path:
    """Say where the folder of public job traces is, or would be."""
    return Path(os.environ.get("SLACKWATER_TRACES", ROOT.parent / "shared" / "traces"))


@pytest.fixture(scope="session")
def traces_dir() -> Path:
    """The folder of public job traces; the test is skipped where it is absent."""
    folder = public_traces()
    if not folder.is_dir():
        pytest.skip(f"the trace folder is absent ({folder}); set SLACKWATER_TRACES")
    return folder
