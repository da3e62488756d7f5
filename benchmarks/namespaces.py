"""Machines of a benchmark: network namespaces around one bridge, each with a shaped link.

For a process that is in a network namespace of its own already (`unshare --net`): all of it
vanishes with that process. Needs root, and `ip` and `tc` of iproute2.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HUB = "10.77.0.1"
"""Where the machines reach whoever made them."""
BACKGROUND_PORT = 4800
"""The port of background traffic."""
HELD_S = 1200
"""Longer no machine lasts, whatever happens to its maker."""
BURST = "128kb"
_INSIDE = "SLACKWATER_BENCHMARK_INSIDE"


@dataclass(frozen=True)
class Machine:
    name: str
    address: str
    holder: subprocess.Popen[bytes]

    def command(self, *inner: str) -> tuple[str, ...]:
        """The command, run there."""
        return ("/usr/bin/nsenter", f"--net=/proc/{self.holder.pid}/ns/net", "--", *inner)

    def tc(self, text: str) -> None:
        sh(*self.command("tc", *text.split()))

    def shape(self, rate_mbit: int) -> None:
        """Limit the rate that leaves its NIC, in two classes; the second is the background's."""
        whole = f"ceil {rate_mbit}mbit burst {BURST} cburst {BURST} quantum 60000"
        self.tc("qdisc add dev nic root handle 1: htb default 10")
        self.tc(f"class add dev nic parent 1: classid 1:1 htb rate {rate_mbit}mbit {whole}")
        self.tc(f"class add dev nic parent 1:1 classid 1:10 htb rate {rate_mbit}mbit {whole}")
        self.tc(f"class add dev nic parent 1:1 classid 1:20 htb rate 1mbit {whole}")
        port = f"u32 match ip dport {BACKGROUND_PORT} 0xffff flowid 1:20"
        self.tc(f"filter add dev nic parent 1: protocol ip prio 1 {port}")

    def share(self, rate_mbit: int, ours: int, others: int) -> None:
        """Flows get equal parts, as queue pairs of a NIC do; what one class leaves the other has.
        How TCP connections share a queue depends on their congestion control, and on luck."""
        whole = f"ceil {rate_mbit}mbit burst {BURST} cburst {BURST} quantum 60000"
        for minor, flows in ((10, ours), (20, others)):
            part_kbit = max(1000, 1000 * rate_mbit * flows // (ours + others))
            which = f"class change dev nic parent 1:1 classid 1:{minor}"
            self.tc(f"{which} htb rate {part_kbit}kbit {whole}")


def in_a_namespace(arguments: Sequence[str], work: Callable[[], None]) -> int:
    """Start this program again in a network namespace of its own, where it does `work`. The bridge
    and all machines are in that namespace, and end with it. Return the exit code."""
    if os.environ.get(_INSIDE):
        work()
        return 0
    command = ["/usr/bin/unshare", "--net", sys.executable, sys.argv[0], *arguments]
    try:
        return subprocess.run(command, env=os.environ | {_INSIDE: "1"}, timeout=HELD_S).returncode
    except subprocess.TimeoutExpired:
        print(f"not done within {HELD_S} s", file=sys.stderr)
        return 1


def sh(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@contextmanager
def machines(rate_mbit: int, *names: str) -> Iterator[dict[str, Machine]]:
    """Namespaces around a bridge that is ours, too. They vanish with who holds them."""
    sh("ip", "link", "set", "lo", "up")
    sh("ip", "link", "add", "hub", "type", "bridge")
    sh("ip", "addr", "add", f"{HUB}/24", "dev", "hub")
    sh("ip", "link", "set", "hub", "up")
    made: dict[str, Machine] = {}
    try:
        for number, name in enumerate(names):
            holder = subprocess.Popen(["/usr/bin/unshare", "--net", "sleep", str(HELD_S)])
            machine = Machine(name, f"10.77.0.{11 + number}", holder)
            made[name] = machine
            _until_unshared(holder.pid)
            sh("ip", "link", "add", name, "type", "veth", "peer", "name", "nic",
               "netns", str(holder.pid))  # fmt: skip
            sh("ip", "link", "set", name, "master", "hub", "up")
            sh(*machine.command("ip", "link", "set", "lo", "up"))
            sh(*machine.command("ip", "addr", "add", f"{machine.address}/24", "dev", "nic"))
            sh(*machine.command("ip", "link", "set", "nic", "up"))
            machine.shape(rate_mbit)
        yield made
    finally:
        for machine in made.values():
            machine.holder.kill()
            machine.holder.wait()


def _until_unshared(pid: int) -> None:
    ours = Path("/proc/self/ns/net").readlink()
    deadline_s = time.monotonic() + 10.0
    while Path(f"/proc/{pid}/ns/net").readlink() == ours:
        if time.monotonic() > deadline_s:
            raise RuntimeError("a namespace could not be made within 10 s: is this root?")
        time.sleep(0.005)
