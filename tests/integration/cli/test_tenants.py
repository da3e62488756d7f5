"""`slackwater tenants`: what is not known yet is not shown as nothing."""

from typing import Any

import pytest
from typer.testing import CliRunner

from slackwater.cli import show
from slackwater.cli.commands import app
from slackwater.schemas.jobs import TenantInfo


def test_a_tenants_use_is_unknown_until_it_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"loss_limit": 0.05, "queued_max": 9, "waiting": 1, "running": 2, "pool_cpu": 8.0}
    idle = TenantInfo(tenant="new", cpu_fraction=0.25, cpu=1.0, **limits)  # type: ignore[arg-type]
    busy = TenantInfo(
        tenant="old", cpu_fraction=0.5, cpu=1.5, used_cpu=1.25, used_slots=12.5, measured=2,
        loss=0.067, beyond=1, **limits,  # type: ignore[arg-type]
    )  # fmt: skip
    told: Any = lambda url, ask: (idle, busy)  # noqa: E731
    monkeypatch.setattr(show, "with_client", told)
    result = CliRunner().invoke(app, ["tenants"], env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    rows = [line.split("│")[1:-1] for line in result.stdout.splitlines() if "│" in line]
    shown = [[cell.strip() for cell in row] for row in rows]
    assert shown == [
        ["new", "1.00", "2.00", "-", "-", "-", "0.05", "0", "2", "1", "9"],
        ["old", "1.50", "4.00", "1.25", "12.50", "6.7%", "0.05", "1", "2", "1", "9"],
    ]
