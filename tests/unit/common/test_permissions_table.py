"""The table of permissions names what services serve and hear, and nothing else."""

import asyncio
from typing import Any

import pytest

from slackwater.common.shell.simulated_loop import run_simulated
from slackwater.common.shell.world import SimWorld
from slackwater.schemas.permissions import HEARS, OF_TENANTS, SERVED, buckets_of
from slackwater.services.controller import shell as controller
from slackwater.services.controller.config import ControllerConfig
from slackwater.services.master import shell as master
from slackwater.services.master.config import MasterConfig
from slackwater.services.profiler import shell as profiler
from slackwater.services.profiler.config import ProfilerConfig

MADE: dict[str, Any] = {
    "master": (master.definition, MasterConfig(id="m1")),
    "controller": (controller.definition, ControllerConfig(id="c1")),
    "profiler": (profiler.definition, ProfilerConfig(id="p1")),
}


@pytest.mark.parametrize("service", MADE)
def test_the_table_is_what_the_definition_says(service: Any) -> None:
    make, config = MADE[service]

    async def defined() -> Any:
        await asyncio.sleep(0)
        return make(config, SimWorld(1).client(service))

    found = run_simulated(defined())
    assert set(SERVED[service]) == set(found.endpoints)
    assert set(HEARS[service]) == set(found.subscriptions)
    assert set(buckets_of(service, found.id)) == set(found.buckets)
    assert set(OF_TENANTS.get(service, ())) <= set(found.endpoints)
