"""Commands whose libraries are extras, where these are not installed."""

import importlib.util
import subprocess
import sys

import pytest

from slackwater.cli import top


def test_the_dashboard_names_the_extra_that_it_needs() -> None:
    program = (
        "import sys; sys.modules['uvicorn'] = None\n"
        "sys.argv = ['slackwater', 'web', '--url', 'nats://127.0.0.1:1']\n"
        "from slackwater.cli.main import main\nmain()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    said = " ".join(done.stderr.split())
    assert "the dashboard needs uvicorn: " in said
    assert "slackwater[web]" in said
    assert (done.returncode, "Traceback" in said) == (78, False)


def test_without_its_extra_the_plain_screen_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    assert top._full_screen() is not None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert top._full_screen() is None
