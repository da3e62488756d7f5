"""From bare machines to jobs: what the guide says, typed."""

import re
import time
from collections.abc import Callable
from typing import Any

import pexpect
import pytest
from tests.lab.conftest import IGNORED
from tests.lab.lab import COMMAND, NAMES, Lab, Played
from tests.lab.load import Load

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1800), IGNORED]
IN_CLUSTER = NAMES[:3]


def until_ended(
    lab: Lab, job: str, within_s: float = 120.0, look: Callable[[], None] = lambda: None
) -> Any:
    until_s = time.monotonic() + within_s
    while time.monotonic() < until_s:
        look()
        found = lab.json(f"job {job}")
        if found["state"] in ("completed", "failed", "cancelled"):
            return found
        time.sleep(0.5)
    raise AssertionError(lab.ask(f"job {job}"))


def test_three_bare_machines_become_a_cluster(lab: Lab, deployed: Played) -> None:
    assert deployed.total("failed") == deployed.total("unreachable") == 0
    nodes = lab.json("nodes")
    assert {each["heartbeat"]["node"] for each in nodes if each["alive"]} == set(IN_CLUSTER)
    assert {each["record"]["id"] for each in lab.json("aggregators")} == set(IN_CLUSTER)


def test_a_second_run_changes_nothing(lab: Lab, deployed: Played) -> None:
    again = lab.play("site.yml")
    assert again.total("changed") == 0, re.findall(r"TASK \[.*\n(?:ok.*\n)*changed.*", again.text)
    assert again.total("failed") == 0


def test_all_is_well(lab: Lab, deployed: Played) -> None:
    """Nothing is bad; the copies of each stream are on three servers, and up to date."""
    checks = {each["what"]: each for each in lab.checks()}
    assert [each for each in checks.values() if each["state"] != "good"] == []
    assert "each on 3 servers" in checks["store"]["why"]


def test_a_gradient_job_trains_over_two_machines(lab: Lab, load: Load) -> None:
    """Its ranks are on one machine, under an account of the job's own; its parameters on two, which
    they reach by shared memory, and on the other machine encrypted."""
    lab.ask("submit --id gradient --model alexnet --workers 2 --iterations 40 --bytes-scale 0.05")
    encrypted: set[str] = set()

    def look() -> None:
        for name in IN_CLUSTER:
            said = lab[name].shell("ss -Htn state established '( dport = :7402 )'")
            encrypted.update(line.split()[-1] for line in said.splitlines())

    ended = until_ended(lab, "gradient", look=look)
    assert encrypted, "the ranks reach an aggregator of another machine"
    for name in IN_CLUSTER:
        heard = lab[name].shell("ss -Hltn '( sport = :7401 or sport = :7501 )'")
        assert not heard.strip(), "nobody listens in clear text"
    assert (ended["state"], ended["reason"]) == ("completed", ""), ended
    assert "its parameters on h1 and h2" in lab.ask("events gradient")


def test_a_gang_of_gpus_trains_over_two_machines(lab: Lab, load: Load) -> None:
    lab.ask(
        "submit --id gang --model alexnet --workers 4 --gpus 4 --iterations 30 --bytes-scale 0.05"
    )
    ended = until_ended(lab, "gang")
    assert (ended["state"], ended["reason"]) == ("completed", ""), ended
    assert "gang runs on h1 (2) and h2 (2)" in lab.ask("events gang")


def test_jobs_have_accounts_of_their_own_and_cannot_read_the_services_secrets(
    lab: Lab, load: Load
) -> None:
    """The program tries each file that has a secret, and the bus with what it finds."""
    secrets = "/etc/slackwater/*.nk /etc/slackwater/*.toml /etc/slackwater/*.key"
    tries = f"id -u; for f in {secrets}; do cat $f && echo READ; done"
    lab.ask(f"submit --id curious --workers 1 -- sh -c '{tries}; true'")
    assert until_ended(lab, "curious")["state"] == "completed"
    account, *said = lab.ask("logs curious").splitlines()
    assert 60000 <= int(account.split()[-1]) < 61000
    assert len(said) >= 8
    assert all("Permission denied" in line for line in said), said


def test_a_person_sits_at_a_terminal_under_the_jobs_account(lab: Lab, load: Load) -> None:
    """In the closed unit of the worker service, which is killed meanwhile."""
    inside = ["-t", str(lab["h1"].leader()), "-a"]
    child = pexpect.spawn(
        "nsenter", [*inside, COMMAND, "launch", "--pty", "--gpus", "1", "--", "sh"],
        timeout=90, encoding="utf8", dimensions=(30, 100),
    )  # fmt: skip
    child.delaybeforesend = None
    child.expect(r"on (h\d); ~\.")
    node = child.match[1]
    child.sendline("echo account-$(id -u) $(tty) $(stty size) $HOME")
    child.expect(r"account-(\d+) /dev/pts/\d+ 30 100 /var/lib/slackwater/worker/jobs/")
    assert 60000 <= int(child.match[1]) < 61000
    lab[node].shell("systemctl kill --kill-whom=main -s KILL slackwater-worker")
    child.sendline("echo still-$((6*7)); exit 5")
    child.expect("still-42")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 5


def test_the_units_are_closed(lab: Lab, deployed: Played, measured: list[str]) -> None:
    """systemd's own scores: 0 is closed, 10 is open."""
    text = "".join(
        lab[name].shell("systemd-analyze security --no-pager | grep -E 'slackwater|nats'; true")
        for name in IN_CLUSTER
    )
    scores = {m[1]: float(m[2]) for m in re.finditer(r"(\S+)\.service +([\d.]+)", text)}
    for unit, score in sorted(scores.items()):
        measured.append(f"systemd-analyze security {unit:<28} {score:.1f}")
    assert len(scores) == 8
    assert scores.pop("slackwater-worker") <= 4.0  # It acts for many accounts.
    assert max(scores.values()) <= 2.0
