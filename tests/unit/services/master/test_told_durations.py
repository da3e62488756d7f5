"""A master that is told how long jobs run may plan with that."""

from pathlib import Path

import msgspec
import pytest

from slackwater.common.base.errors import ConfigRejected
from slackwater.common.shell.simulated_loop import run_simulated
from slackwater.common.shell.world import SimWorld
from slackwater.services.master.config import MasterConfig
from slackwater.services.master.core import Master
from slackwater.services.master.shell import definition


def master(durations: Path | str) -> Master:
    return run_simulated(_master(durations))


async def _master(durations: Path | str) -> Master:
    world = SimWorld(1)
    config = MasterConfig(gpu_policy="srsf", gpu_durations=str(durations))
    core = definition(config, world.client("master")).core
    assert isinstance(core, Master)
    return core


def test_a_policy_that_plans_with_durations_is_taken_where_a_file_tells_them(
    tmp_path: Path,
) -> None:
    told = tmp_path / "durations.json"
    told.write_bytes(msgspec.json.encode({"a": 12.5}))
    assert dict(master(told).state.gpus.snapshot.durations) == {"a": 12.5}


@pytest.mark.parametrize("content", [None, b"{", b'{"a": "long"}', b'{"a": -1}'])
def test_a_file_that_cannot_be_read_is_refused_by_name(
    content: bytes | None, tmp_path: Path
) -> None:
    told = tmp_path / "durations.json"
    if content is not None:
        told.write_bytes(content)
    with pytest.raises(ConfigRejected, match=r"durations\.json"):
        master(told)


def test_without_a_file_it_is_refused() -> None:
    with pytest.raises(ConfigRejected, match="the time that each job still needs"):
        master("")
