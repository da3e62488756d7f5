"""Faults under load: each ends as docs/guide/faults.md says, and no acknowledged job is lost.

How long the cluster took no new jobs is measured and printed, and not asserted: the machines of the
lab share two cores.
"""

import subprocess
import time
from collections.abc import Iterator

import pytest
from tests.lab.conftest import IGNORED, Undergo
from tests.lab.lab import ROOT, Lab
from tests.lab.load import Load
from tests.lab.machines import STORE, Machine, run

from slackwater.common.shell.client import Client
from slackwater.schemas import subjects
from slackwater.schemas.progress import JobProgress
from slackwater.schemas.service import GetInfo, Info

pytestmark = [pytest.mark.lab, pytest.mark.timeout(600), IGNORED]
HOSTS = {"master": "h1", "controller": "h1", "aggregator": "h2", "profiler": "h2", "worker": "h1",
         "slabd": "h3"}  # fmt: skip


def leader(load: Load) -> str:
    """Name the machine whose master leads."""

    async def ask(client: Client) -> str:
        subject = subjects.command("master", subjects.MASTER, "info")
        return (await client.ask(subject, GetInfo(), Info)).host

    return load.run(ask)


def other(lab: Lab, name: str) -> Machine:
    return lab["h2" if name == "h1" else "h1"]


def wait(what: str, holds: object, within_s: float = 60.0) -> None:
    assert callable(holds)
    until_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < until_s, f"{what} did not come within {within_s:g} s"
        time.sleep(0.2)


def is_active(machine: Machine, unit: str) -> bool:
    return machine.shell(f"systemctl is-active {unit}", check=False).strip() == "active"


def kill(machine: Machine, unit: str, signal: str = "KILL") -> None:
    """Signal its main process, and wait until systemd has another one that serves."""
    show = f"systemctl show --property MainPID --value {unit}"
    before = machine.shell(show).strip()
    machine.shell(f"systemctl kill --kill-whom=main --signal={signal} {unit}")
    if signal == "KILL":
        wait(
            f"another {unit}",
            lambda: is_active(machine, unit) and machine.shell(show).strip() not in ("0", before),
        )


@pytest.fixture(scope="module")
def training(lab: Lab, load: Load) -> str:
    """A job that trains all the while, its ranks on one machine, its parameters on two."""
    lab.ask(
        "submit --id training --model alexnet --workers 2 --iterations 1000000 --bytes-scale 0.02 "
        "--restarts 1000"
    )
    return "training"


@pytest.fixture(autouse=True)
def goes_on(lab: Lab, load: Load, training: str) -> Iterator[None]:
    """A fault begins with a cluster that is well; the job that trains makes progress afterwards."""
    wait("a cluster that is well", lambda: not [
        each for each in lab.checks() if each["state"] == "bad"
    ], 90.0)  # fmt: skip
    yield

    async def iteration(client: Client) -> int:
        info = await client.job_info(training)
        assert info.job.state not in ("failed", "completed", "cancelled"), info.job.reason
        return (info.progress or JobProgress()).iteration

    seen = load.run(iteration)
    try:
        wait("progress of the job that trains", lambda: load.run(iteration) not in (0, seen), 120.0)
    except AssertionError as error:
        error.add_note(lab.told(training))
        raise


# Processes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("service", HOSTS)
def test_kill(lab: Lab, load: Load, undergo: Undergo, service: str) -> None:
    """kill-master, kill-controller, kill-aggregator, kill-profiler, kill-worker, kill-slabd"""
    machine = lab[leader(load)] if service == "master" else lab[HOSTS[service]]
    with undergo(f"kill -9 of the {service}"):
        kill(machine, f"slackwater-{service}")


def test_kill_standby(lab: Lab, load: Load, undergo: Undergo) -> None:
    with undergo("kill -9 of the standby master"):
        kill(other(lab, leader(load)), "slackwater-master")


def test_kill_bus_server(lab: Lab, undergo: Undergo) -> None:
    for name in ("h1", "h2", "h3"):
        with undergo(f"kill -9 of bus server {name}"):
            kill(lab[name], "nats-server")
            wait(f"{name} to have all", lambda name=name: healthy(lab[name]))


def healthy(machine: Machine) -> bool:
    """Say whether its bus server has what the others have."""
    said = machine.shell("curl -s http://127.0.0.1:8222/healthz", check=False)
    return '"status":"ok"' in said


def test_kill_watch(lab: Lab, undergo: Undergo) -> None:
    with undergo("kill -9 of a disk's watch"):
        kill(lab["h1"], "nats-server-watch")


def test_kill_rank(lab: Lab, undergo: Undergo) -> None:
    with undergo("kill -9 of a rank of a job"):
        for name in ("h1", "h2", "h3"):
            lab[name].shell("pkill -KILL -f slackwater.loadgen.emulate", check=False)


@pytest.mark.parametrize("service", ["master", "aggregator"])
def test_hang(lab: Lab, load: Load, undergo: Undergo, service: str) -> None:
    """Stopped, not dead: systemd's watchdog ends it, and what is started then goes on."""
    machine = lab[leader(load)] if service == "master" else lab["h2"]
    unit = f"slackwater-{service}"
    main = machine.shell(f"systemctl show --property MainPID --value {unit}").strip()
    with undergo(f"the {service} hangs"):
        kill(machine, unit, "STOP")
        wait("its end", lambda: not machine.shell(f"cat /proc/{main}/comm", check=False).strip()
             or "No such" in machine.shell(f"cat /proc/{main}/comm", check=False))  # fmt: skip
        wait("its return", lambda: is_active(machine, unit))


# Machines -----------------------------------------------------------------------------------------


def up(lab: Lab, name: str) -> None:
    lab[name].until_up(90.0)
    wait(f"{name}'s services", lambda: not lab[name].shell(
        "systemctl list-units --failed --plain --no-legend 'slackwater*' 'nats*'").strip()
        and is_active(lab[name], "slackwater-worker"))  # fmt: skip
    wait(f"{name} to have all", lambda: healthy(lab[name]))


def test_reboot(lab: Lab, undergo: Undergo) -> None:
    with undergo("a reboot of h3"):
        lab["h3"].shell("systemctl poweroff", check=False)
        wait("its end", lambda: not lab["h3"].running())
        lab["h3"].kill()
        lab["h3"].boot()
        up(lab, "h3")


@pytest.mark.parametrize("name", ["h2", "h1"])
def test_power_loss(lab: Lab, load: Load, undergo: Undergo, name: str) -> None:
    """h2: an aggregator of the job that trains, a master; h1: the controller, the ranks, too."""
    with undergo(f"power loss of {name}, back after 10 s"):
        lab[name].kill()
        try:
            load.accepts(60.0)  # Two machines go on.
            time.sleep(10.0)
        finally:
            lab[name].boot()
        up(lab, name)


@pytest.mark.parametrize("name", ["h3", "h1"])
def test_partition(lab: Lab, load: Load, undergo: Undergo, name: str) -> None:
    with undergo(f"{name} cut off for 12 s"):
        lab[name].link("down")
        time.sleep(12.0)
        lab[name].link("up")
        wait(f"{name} to have all", lambda: healthy(lab[name]))


@pytest.mark.parametrize("way", ["input", "output"])
def test_one_way_partition(lab: Lab, undergo: Undergo, way: str) -> None:
    """input: h2 hears nobody; output: nobody hears it."""
    match = {"input": "iifname eth0 tcp dport != 22", "output": "oifname eth0 tcp sport != 22"}
    rules = (
        f"add table inet cut; add chain inet cut c {{ type filter hook {way} priority -5; }}; "
        f"add rule inet cut c {match[way]} drop"
    )
    with undergo(f"h2 cut off one way ({way}) for 12 s"):
        lab["h2"].enter("nft", rules)
        time.sleep(12.0)
        lab["h2"].enter("nft", "delete table inet cut")
        wait("h2 to have all", lambda: healthy(lab["h2"]))


# The bus ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["h1", "h2", "h3"])
def test_full_disk(lab: Lab, load: Load, undergo: Undergo, name: str) -> None:
    """The disk of one bus server: it is named while it is full; two of three servers are enough."""
    with undergo(f"full disk of bus server {name} for 10 s"):
        fill(lab[name])
        wait("its name", lambda: any(
            name in each["what"] and each["state"] == "bad" for each in lab.checks()
        ), 30.0)  # fmt: skip
        load.accepts(60.0)
        time.sleep(5.0)
        lab[name].shell(f"rm {STORE}/full")
        wait(f"{name} to have all", lambda: healthy(lab[name]))


def fill(machine: Machine) -> None:
    machine.shell(f"dd if=/dev/zero of={STORE}/full bs=1M count=400; true")


def test_full_disks(lab: Lab, load: Load, undergo: Undergo, measured: list[str]) -> None:
    """All three: new jobs are refused by the disk's name; those that are there go on."""
    with undergo("full disks of all bus servers for 10 s"):
        refused = len(load.refusals)
        for name in ("h1", "h2", "h3"):
            fill(lab[name])
        wait("a refusal that says so", lambda: any(
            "disk" in each for each in load.refusals[refused:]), 40.0)  # fmt: skip
        assert lab.json("jobs") is not None
        for name in ("h1", "h2", "h3"):
            lab[name].shell(f"rm {STORE}/full")
        room_s = time.monotonic()
        load.accepts(60.0)
        measured.append(f"new jobs {time.monotonic() - room_s:.1f} s after all disks had room")


def test_read_only_disk(lab: Lab, load: Load, undergo: Undergo) -> None:
    """A disk that came back read-only: its server cannot start, is named, and starts by itself."""
    machine = lab["h3"]
    with undergo("read-only disk of bus server h3"):
        machine.shell("systemctl stop nats-server nats-server-watch")
        run("mount", "-o", "remount,ro", str(machine.store))
        machine.shell("systemctl start --no-block nats-server nats-server-watch")
        wait("its name", lambda: any(
            "h3" in each["what"] and "read-only" in each["why"] for each in lab.checks()
        ), 30.0)  # fmt: skip
        load.accepts(60.0)
        run("mount", "-o", "remount,rw", str(machine.store))
        wait("h3 to have all", lambda: healthy(machine))


def test_lost_quorum(lab: Lab, load: Load, undergo: Undergo) -> None:
    """Two of three servers: refusals until one is back; nothing that was acknowledged is lost."""
    with undergo("two of three bus servers stopped, 10 s"):
        refused = len(load.refusals)
        for name in ("h2", "h3"):
            lab[name].shell("systemctl stop nats-server")
        wait("a refusal", lambda: len(load.refusals) > refused, 60.0)
        time.sleep(10.0)
        for name in ("h2", "h3"):
            lab[name].shell("systemctl start nats-server")
        wait("h3 to have all", lambda: healthy(lab["h3"]), 120.0)


def test_all_bus_servers(lab: Lab, undergo: Undergo) -> None:
    with undergo("all bus servers killed at once"):
        for name in ("h1", "h2", "h3"):
            lab[name].shell("systemctl kill --signal=KILL nats-server")
        wait("h1 to have all", lambda: healthy(lab["h1"]), 120.0)


# Clocks -------------------------------------------------------------------------------------------


def named(lab: Lab, name: str, hour: str) -> bool:
    """Say whether the clock is told to be wrong: by doctor, or, where the machine is at a time
    before the servers' certificates, by the service that cannot connect."""
    if hour == "+1h":
        return any("clock" in each["why"] for each in lab.checks())
    log = lab[name].shell("journalctl -u slackwater-master -n 20 -o cat")
    return "not yet valid" in log and "set this machine's clock" in log


@pytest.mark.parametrize("hour", ["+1h", "-1h"])
def test_clock_step(lab: Lab, load: Load, undergo: Undergo, hour: str) -> None:
    """Clocks of the leading master and of a worker service are an hour off, and then are not. A
    service that runs does not see a step: each is started anew after it, and after the next."""
    name = leader(load)
    units = {name: "slackwater-master", "h3": "slackwater-worker"}
    library = "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1"
    clock = (
        f"[Service]\\nEnvironment=LD_PRELOAD={library} FAKETIME={hour} "
        "FAKETIME_DONT_FAKE_MONOTONIC=1\\n"
    )
    with undergo(f"clock steps by {hour} and back"):
        for machine, unit in units.items():
            folder = f"/run/systemd/system/{unit}.service.d"
            lab[machine].shell(
                f"mkdir -p {folder}; printf '{clock}' > {folder}/clock.conf; "
                f"systemctl daemon-reload; systemctl restart --no-block {unit}"
            )
        try:
            wait("its name", lambda: named(lab, name, hour))
            load.accepts(60.0)
        finally:
            for machine, unit in units.items():
                lab[machine].shell(
                    f"rm -r /run/systemd/system/{unit}.service.d; systemctl daemon-reload; "
                    f"systemctl restart {unit}"
                )


# Strangers and certificates -----------------------------------------------------------------------


def test_stranger(lab: Lab, undergo: Undergo) -> None:
    """Another machine without a seed, a seed that nobody knows, no TLS: not let in."""
    from slackwater.common.bus.users import new_seed

    seed = lab.home / "stranger.nk"
    seed.write_text(new_seed() + "\n")
    ca = lab.secrets / "ca.pem"
    with undergo("strangers at the bus"):
        for words in (["--tlsca", str(ca)], ["--tlsca", str(ca), "--nkey", str(seed)], []):
            done = subprocess.run(
                [str(ROOT / ".venv/bin/slackwater"), *words, "nodes", "--url", lab.url],
                capture_output=True, text=True, timeout=60, check=False,
            )  # fmt: skip
            assert done.returncode != 0
            assert "refuses" in done.stderr or "not to be trusted" in done.stderr, done.stderr


def test_expired_certificate(lab: Lab, undergo: Undergo) -> None:
    """One server has a certificate that has ended: it is named, the other two serve."""
    config = "/etc/slackwater/nats"
    with undergo("an expired certificate of bus server h3"):
        expired = certificate(lab, "h3")
        (lab["h3"].root / f"{config[1:]}/expired.pem").write_text(expired)
        lab["h3"].shell(
            f"cd {config}; cp server.pem kept.pem; cp expired.pem server.pem; "
            "chown slackwater-nats *.pem; systemctl reload nats-server"
        )
        wait("its name", lambda: any(
            "10.77.0.13" in each["what"] and "expired" in each["why"]
            for each in lab.checks()), 30.0)  # fmt: skip
        lab["h3"].shell(f"cp {config}/kept.pem {config}/server.pem; systemctl reload nats-server")


def certificate(lab: Lab, name: str) -> str:
    """Sign a certificate for the server's key that ended an hour ago."""
    secrets = lab.secrets
    words = [
        "openssl", "x509", "-req", "-in", f"{secrets}/{name}.csr", "-CA", f"{secrets}/ca.pem",
        "-CAkey", f"{secrets}/ca.key", "-CAcreateserial", "-days", "-1",
        "-extfile", f"{secrets}/{name}.ext",
    ]  # fmt: skip
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return done.stdout
