"""The interface to other machines, by name or by address, and its budget."""

from types import SimpleNamespace

import pytest

from slackwater.common.base.errors import ConfigRejected
from slackwater.common.native import link
from slackwater.common.native.link import Interface, Link, interface_with, link_of

TWO = {
    "lo": {"127.0.0.1", "::1"},
    "eth0": {"10.1.2.3", "fe80::1"},
    "eth1": {"192.168.0.9"},
}


@pytest.fixture
def interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """One interface of 10 Gbit/s, and one that does not say how fast it is."""
    speeds = {"eth0": SimpleNamespace(speed=10_000), "virtual0": SimpleNamespace(speed=0)}
    counters = {"eth0": SimpleNamespace(bytes_recv=1000, bytes_sent=2000)}
    monkeypatch.setattr(link.psutil, "net_if_stats", lambda: speeds)
    monkeypatch.setattr(link.psutil, "net_io_counters", lambda **how: counters)


@pytest.mark.usefixtures("interfaces")
def test_speeds_and_counters_are_in_bytes() -> None:
    eth0 = Interface("eth0")
    assert eth0.speed_bytes_s == 1_250_000_000
    assert eth0.carried_bytes() == (1000, 2000)
    virtual = Interface("virtual0")
    assert virtual.speed_bytes_s == 0
    assert virtual.carried_bytes() == (0, 0), "it is gone"


@pytest.mark.usefixtures("interfaces")
def test_an_interface_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(ConfigRejected, match=r"'ib7': this machine has eth0, virtual0"):
        Interface("ib7")


def test_the_loopback_counts_what_it_carries() -> None:
    """The real one: every machine has it."""
    loopback = Interface("lo")
    assert all(count >= 0 for count in loopback.carried_bytes())
    assert "lo" in link.addresses()


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("10.1.2.3:7401", "eth0"),
        ("[fe80::1]:7401", "eth0"),
        ("192.168.0.9:0", "eth1"),
        ("127.0.0.1:7401", ""),
        ("10.9.9.9:7401", ""),
        ("localhost:7401", ""),
        ("0.0.0.0:7401", ""),
        ("nonsense", ""),
    ],
)
def test_an_address_tells_its_interface(
    monkeypatch: pytest.MonkeyPatch, address: str, name: str
) -> None:
    monkeypatch.setattr(link, "addresses", lambda: TWO)
    assert interface_with(address) == name


def test_all_addresses_are_those_of_the_only_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "addresses", lambda: {"lo": {"127.0.0.1"}, "eth7": {"10.0.0.1"}})
    assert interface_with("0.0.0.0:7401") == "eth7"
    assert interface_with("[::]:7401") == "eth7"


def test_a_budget_needs_an_interface() -> None:
    with pytest.raises(ConfigRejected, match="name network_interface"):
        link_of("", 1_000_000, ["127.0.0.1:7401"])
    assert link_of("", 0, ["127.0.0.1:7401"]) is None
    found = link_of("lo", 1_000_000, [])
    assert isinstance(found, Link)
    assert (found.interface.name, found.budget_bytes_s) == ("lo", 1_000_000)
    assert link_of("lo", 0, []) is None, "the loopback does not say what it can carry"
