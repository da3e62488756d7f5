"""A network interface of this machine: how fast it says it is, and what it has carried.

The kernel counts what passes through its own network stack. What a NIC moves by itself (RDMA) is
not among it.
"""

import ipaddress
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import psutil

from slackwater.common.base.errors import ConfigRejected

ANYWHERE: Final = "0.0.0.0:0"
"""An address that stands for all of this machine's."""
_MBIT_BYTES: Final = 1_000_000 // 8


class Interface:
    """Reads the counters of one interface of this process's network namespace."""

    def __init__(self, name: str) -> None:
        """Raises ConfigRejected: there is none of this name."""
        self.name = name
        known = psutil.net_if_stats()
        if name not in known:
            there = ", ".join(sorted(known))
            raise ConfigRejected(f"network_interface {name!r}: this machine has {there}")
        self.speed_bytes_s: int = max(0, known[name].speed) * _MBIT_BYTES
        """Bytes a second that it says it can carry, each way; 0: it does not say."""

    def carried_bytes(self) -> tuple[int, int]:
        """Return (bytes received, bytes sent) so far; none where it is gone."""
        counters = psutil.net_io_counters(pernic=True, nowrap=False).get(self.name)
        return (counters.bytes_recv, counters.bytes_sent) if counters is not None else (0, 0)


@dataclass(frozen=True, slots=True)
class Link:
    """This machine's interface to the others, and the bytes a second each way that are to be had
    of it."""

    interface: Interface
    budget_bytes_s: int


def link_of(name: str, bytes_s: int, addresses: Iterable[str]) -> Link | None:
    """Return the link of the interface of this name, or else of the first one that has one of these
    addresses (`host:port`), with the budget `bytes_s`, or else what the interface says it can
    carry. None: neither is known. Raises ConfigRejected."""
    found = name or next((found for each in addresses if (found := interface_with(each))), "")
    if not found:
        if bytes_s:
            raise ConfigRejected(
                f"a network budget of {bytes_s} bytes a second, and no address outside of the "
                "loopback tells which interface it is of: name network_interface"
            )
        return None
    interface = Interface(found)
    budget = bytes_s or interface.speed_bytes_s
    return Link(interface, budget) if budget else None


def interface_with(address: str) -> str:
    """Return the name of the interface that has this address (`host:port`, the host an IPv4 or IPv6
    address or a name); empty: it is the loopback's or nobody's. An address that stands for all of
    them is that of the only one beside the loopback."""
    host = address.rpartition(":")[0].strip("[]")
    if not host:
        return ""
    try:
        wanted = ipaddress.ip_address(host)
    except ValueError:
        try:
            wanted = ipaddress.ip_address(socket.gethostbyname(host))
        except OSError:
            return ""
    if wanted.is_loopback:
        return ""
    others = {
        name: ips
        for name, ips in addresses().items()
        if not any(ipaddress.ip_address(ip).is_loopback for ip in ips)
    }
    if wanted.is_unspecified:
        return next(iter(others)) if len(others) == 1 else ""
    return next((name for name, ips in others.items() if str(wanted) in ips), "")


def addresses() -> dict[str, set[str]]:
    """Return the IPv4 and IPv6 addresses of each interface that has any."""
    found: dict[str, set[str]] = {}
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family in (socket.AF_INET, socket.AF_INET6):
                found.setdefault(name, set()).add(entry.address.partition("%")[0])
    return found
