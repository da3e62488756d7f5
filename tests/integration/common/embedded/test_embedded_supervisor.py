"""The supervisor in systemd's place: restarts, descriptors, watchdog, orphans, a clean end."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slackwater.common.base import codec
from slackwater.common.base.errors import ConfigRejected, Fatal
from slackwater.common.embedded import UnitSpec, supervisor
from slackwater.common.store.nats import NatsStore
from slackwater.schemas.base import Message, Ok, Refused
from slackwater.schemas.service import Drain, GetHealth, GetInfo, Health, Info

pytestmark = pytest.mark.live


async def _answers(lab: Any, verb: str, message: Message, kind: Any, id: str = "t1") -> Any:
    subject = f"sw.v1.cmd.toy.{id}.{verb}"
    raw = await lab.bus.request(subject, codec.encode(message), timeout_s=5.0)
    return codec.decode(raw, kind)


async def test_a_killed_service_is_back_with_its_records_and_a_higher_epoch(lab: Any) -> None:
    await lab.supervisor.start_units([lab.spec()])
    add = lab.toy.Add(command="c1", account="a", amount=5)
    first = await lab.ask("add", add)
    info = await _answers(lab, "info", GetInfo(), Info)
    assert info.pid == lab.supervisor.units["t1"].pid
    lab.supervisor.kill("t1", signal.SIGKILL)
    again = await lab.until_done("add", add)
    assert (again.total, again.epoch) == (5, first.epoch + 1)
    await lab.supervisor.until_ready("t1")  # It answers before it has said so.
    status = {unit.name: unit for unit in lab.supervisor.status()}["t1"]
    assert (status.state, status.restarts) == ("ready", 1)
    assert status.pid != info.pid


async def test_a_task_of_the_supervisor_that_fails_is_its_failure(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended unseen: nothing was reaped any more, and its units would have stayed away."""

    def broken(path: Path) -> None:
        raise ValueError("injected")

    await lab.supervisor.start_units([lab.spec()])
    monkeypatch.setattr(supervisor, "rotate", broken)
    async with asyncio.timeout(20):
        await lab.supervisor.failed.wait()
    assert isinstance(lab.supervisor.failure, Fatal)
    assert str(lab.supervisor.failure) == "Supervisor._reap failed: ValueError('injected')"


async def test_a_unit_that_cannot_be_started_has_failed(lab: Any) -> None:
    """It counted as stopped, as if somebody had asked for that."""
    with pytest.raises(Fatal, match="t1: cannot be started or watched: ValueError"):
        await lab.supervisor.start_units([replace(lab.spec(), command=("a\0b",))])
    assert lab.supervisor.units["t1"].state == "failed"


async def test_memory_in_the_descriptor_store_survives_kill_9(lab: Any) -> None:
    """Stored descriptors come back under their names, many at once; dropped ones do not."""
    await lab.supervisor.start_units([lab.spec()])
    content = {f"region-{n}": bytes([n]) * (100 + n) for n in range(40)}
    for name, data in content.items():
        assert isinstance(await lab.ask("keep", lab.toy.Keep(name=name, content=data)), Ok)
    for _ in range(2):
        lab.supervisor.kill("t1", signal.SIGKILL)
        kept = await lab.until_done("tell", lab.toy.Tell(what="kept"))
        assert kept.content == content
    unit = lab.supervisor.units["t1"]
    assert unit.status.descriptors == 40
    lab.supervisor.drop_fds("t1")
    lab.supervisor.kill("t1", signal.SIGKILL)
    assert (await lab.until_done("tell", lab.toy.Tell(what="kept"))).content == {}
    await lab.ask("keep", lab.toy.Keep(name="one", content=b"1"))
    assert unit.status.descriptors == 1
    await lab.ask("tell", lab.toy.Tell(what="forget"))
    assert unit.status.descriptors == 0


async def test_the_bus_server_is_killed_and_all_goes_on(lab: Any) -> None:
    """The server comes back on its port; the same process of the service answers again, and the
    record that was acknowledged before is there."""
    await lab.supervisor.start_units([lab.spec()])
    pid = lab.supervisor.units["t1"].pid
    url = lab.supervisor.url
    for round in range(3):
        answer = await lab.until_done(
            "add", lab.toy.Add(command=f"c{round}", account="a", amount=1)
        )
        assert answer.total == round + 1
        lab.supervisor.kill("nats", signal.SIGKILL)
        await asyncio.sleep(0.05)
    answer = await lab.until_done("add", lab.toy.Add(command="c9", account="a", amount=1))
    assert answer.total == 4
    assert lab.supervisor.url == url
    assert lab.supervisor.units["t1"].pid == pid
    assert lab.supervisor.status()[0].restarts == 3


async def test_a_hanging_loop_is_ended_by_the_watchdog(lab: Any) -> None:
    spec = lab.spec()
    spec = UnitSpec(name="t1", command=spec.command, watchdog_s=1.0)
    await lab.supervisor.start_units([spec])
    pid = lab.supervisor.units["t1"].pid
    hanging = asyncio.ensure_future(lab.ask("tell", lab.toy.Tell(what="hang"), timeout_s=30.0))
    assert isinstance(
        (await lab.until_done("add", lab.toy.Add(command="c", account="a", amount=1))), lab.toy.Sum
    )
    assert lab.supervisor.units["t1"].pid != pid
    assert "hang" in lab.supervisor.units["t1"].log_path.read_text()  # Where it hung.
    hanging.cancel()
    await asyncio.gather(hanging, return_exceptions=True)


async def test_an_orphan_is_found_and_ended_with_the_rest(lab: Any) -> None:
    await lab.supervisor.start_units([lab.spec()])
    await lab.ask("tell", lab.toy.Tell(what="orphan"))
    assert lab.supervisor.orphans() == []
    lab.supervisor.kill("t1", signal.SIGKILL)
    await lab.until_done("tell", lab.toy.Tell(what="kept"))
    (orphan,) = lab.supervisor.orphans()
    assert _command(orphan).startswith("/bin/sleep")
    await lab.supervisor.stop()
    assert _command(orphan) == ""


async def test_drain_ends_with_code_0_and_is_not_restarted(lab: Any) -> None:
    await lab.supervisor.start_units([lab.spec()])
    assert (await _answers(lab, "health", GetHealth(), Health)).state == "ok"
    assert isinstance(await _answers(lab, "drain", Drain(), Ok), Ok)
    unit = lab.supervisor.units["t1"]
    async with asyncio.timeout(10.0):
        await unit.ended.wait()
    assert (unit.status.state, unit.status.restarts) == ("stopped", 0)


async def test_a_wrong_configuration_fails_the_start_in_one_line(lab: Any) -> None:
    with pytest.raises(ConfigRejected, match=r"unknown key bukcet; the nearest is bucket"):
        await lab.supervisor.start_units([lab.spec(bukcet="x")])


async def test_a_service_that_never_gets_ready_fails_the_start(lab: Any) -> None:
    spec = UnitSpec(name="bad", command=("/bin/false",))
    with pytest.raises(Fatal, match="ended 3 times"):
        await lab.supervisor.start_units([spec])
    slow = UnitSpec(name="slow", command=("/bin/sleep", "100"), start_s=0.3)
    with pytest.raises(Fatal, match="signal 6"):
        await lab.supervisor.start_units([slow])


async def test_a_message_that_breaks_the_core_costs_one_restart_and_counts_toward_no_limit(
    lab: Any,
) -> None:
    """Its record could not be read back. Unbounded sums are the toy's own fault."""
    await lab.supervisor.start_units([replace(lab.spec(), restarts_max=0)])
    unit = lab.supervisor.units["t1"]
    for command in ("c1", "c2"):
        await lab.ask("add", lab.toy.Add(command=command, account="a", amount=2**63 - 1))
    for number in range(3):
        breaking = lab.toy.Add(command=f"b{number}", account="a", amount=100)
        for _ in range(4):  # An honest sender repeats it.
            refused = await lab.until_done("add", breaking)
            assert isinstance(refused, Refused)
            assert "Account cannot be stored" in refused.reason
        assert unit.restarts == number + 1
    assert (await lab.until_done("add", lab.toy.Add(command="d", account="b", amount=1))).total == 1
    assert (await lab.stored())["a"].commands == ("c1", "c2")


async def test_a_service_starts_without_a_damaged_record_and_says_so(lab: Any) -> None:
    await lab.supervisor.start_units([lab.spec()])
    for account in ("a", "b"):
        await lab.ask("add", lab.toy.Add(command="c", account=account, amount=5))
    store = NatsStore(lab.bus)
    bucket = await store.bucket("toys-t1")
    await bucket.put("a", b"damaged", expected_last=await bucket.last_sequence())
    lab.supervisor.kill("t1", signal.SIGKILL)
    again = lab.toy.Add(command="c", account="b", amount=5)
    assert (await lab.until_done("add", again)).total == 5
    health = await _answers(lab, "health", GetHealth(), Health)
    assert (health.state, "set aside: a" in health.reason) == ("degraded", True)
    copies, *_ = await (await store.bucket("damaged")).load()
    assert [(key[:10], entry.value) for key, entry in copies.items()] == [
        ("toys-t1.a.", b"damaged")
    ]


async def test_an_instance_that_was_replaced_ends(lab: Any) -> None:
    """Two processes over one bucket: the older one ends at its next write, with the reason."""
    await lab.supervisor.start_units([lab.spec()])
    await lab.ask("add", lab.toy.Add(command="c1", account="a", amount=1))
    os.kill(lab.supervisor.units["t1"].pid, signal.SIGSTOP)
    newer = lab.spec("t2", bucket="toys-t1")
    await lab.supervisor.start_units([newer])
    await lab.ask("add", lab.toy.Add(command="c2", account="b", amount=1), "t2")
    waiting = [
        asyncio.ensure_future(lab.ask("add", lab.toy.Add(command="c3", account=f"x{n}", amount=1)))
        for n in range(50)
    ]
    await asyncio.sleep(0.1)
    older = lab.supervisor.units["t1"]
    lives = older.restarts
    os.kill(older.pid, signal.SIGCONT)
    answers = await asyncio.gather(*waiting, return_exceptions=True)
    assert not [answer for answer in answers if isinstance(answer, lab.toy.Sum)]
    async with asyncio.timeout(10.0):
        while older.restarts == lives:  # noqa: ASYNC110 (a counter, not an event)
            await asyncio.sleep(0.01)
    assert "another instance has taken it over" in older.log_path.read_text()


async def test_the_standby_leads_once_the_leader_is_gone(lab: Any) -> None:
    """Both answer under one id; the second stands by, ready, until the first lets the lease go."""
    common = {"lease": "toy-lease", "id": "main", "bucket": "toys-main"}
    await lab.supervisor.start_units([lab.spec("m1", instance="m1", **common)])
    await lab.ask("add", lab.toy.Add(command="c1", account="a", amount=1), "main")
    await lab.supervisor.start_units([lab.spec("m2", instance="m2", **common)])
    assert lab.supervisor.units["m2"].status.text == "standby"
    assert isinstance(await _answers(lab, "drain", Drain(), Ok, "main"), Ok)
    async with asyncio.timeout(20):
        await lab.supervisor.units["m1"].ended.wait()  # It still answers what it has begun.
    add = lab.toy.Add(command="c2", account="a", amount=1)
    answer = await lab.until_done("add", add, "main")
    assert (answer.total, answer.epoch) == (2, 2)


@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.08, 0.2, 0.5, 0.9, 1.4, 2.0])
def test_ctrl_c_at_any_moment_leaves_nothing(tmp_path: Path, delay_s: float) -> None:
    """A program that starts a supervisor and toys is interrupted: while it starts, and later."""
    script = Path(__file__).with_name("supervised_toys.py")
    environment = os.environ | {"TMPDIR": str(tmp_path), "TOY_MARK": str(tmp_path)}
    program = subprocess.Popen(
        [sys.executable, str(script)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert program.stdout is not None
    assert program.stdout.readline() == b"started\n"
    time.sleep(delay_s)
    os.killpg(program.pid, signal.SIGINT)
    if delay_s == 0.9:
        os.killpg(program.pid, signal.SIGINT)  # In a hurry.
    _, errors = program.communicate(timeout=40)
    assert program.returncode == 130, errors.decode()
    assert list(tmp_path.iterdir()) == []
    assert _marked(str(tmp_path)) == []


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def _marked(mark: str) -> list[str]:
    """The command lines of the processes that carry the mark in their environment."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if f"TOY_MARK={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found.append((folder / "cmdline").read_text())
            except OSError:
                continue
    return found
