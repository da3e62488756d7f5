"""Reports on tenants to an operator: the whole system in virtual time, one tenant's jobs beside
another's."""

import asyncio
from random import Random
from statistics import median

import msgspec
import pytest
from tests.sim.system import SHARE, make_job, whole_system

from slackwater.common.shell.simulated_loop import run_simulated
from slackwater.services.master.state import tenants


def test_a_tenants_use_and_loss_are_what_its_jobs_really_did() -> None:
    """Tenant `a` has a job with 0.3 s of slot time an iteration, `b` one with 0.2 s whose computing
    lasts half as long again after it was profiled."""

    async def main() -> None:
        async with whole_system(3, policy="edf") as system:
            system.faults.drop = system.faults.duplicate = 0.0
            await asyncio.sleep(2.0)
            for tenant, duty in (("a", 0.3), ("b", 0.2)):
                job = make_job(f"{tenant}1", 1.0, duty * SHARE, 900, Random(tenant))
                job.spec = msgspec.structs.replace(job.spec, tenant=tenant)
                await system.submit(job)
            await asyncio.sleep(60.0)
            system.jobs["b1"].slow = [1.5, 1.5]
            await asyncio.sleep(90.0)
            assert system.master is not None
            ours, theirs = tenants(system.master.state, system.now_s())
            assert (ours.tenant, ours.measured, ours.beyond) == ("a", 1, 0)
            ended = [system.jobs[id].iterations_s[-20:] for id in ("a1", "b1")]
            a_s, b_s = (median(lasted_s for _, lasted_s in each) for each in ended)
            assert ours.used_slots == pytest.approx(0.3 / a_s, rel=0.07)
            assert ours.used_cpu == pytest.approx(0.3 / a_s * SHARE, rel=0.07)
            assert ours.loss < 0.1
            assert (theirs.tenant, theirs.measured, theirs.beyond) == ("b", 1, 1)
            assert theirs.used_slots == pytest.approx(0.2 / b_s, rel=0.07)
            assert theirs.loss == pytest.approx(1.0 - 1.0 / 1.5, abs=0.05)

    run_simulated(main())
