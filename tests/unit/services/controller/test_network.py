"""Links of machines: jobs whose gradients would load one beyond its budget go elsewhere."""

import pytest
from tests.unit.services.controller.harness import Harness, Pool

from slackwater.schemas.base import AggregatorId, JobId, NodeId
from slackwater.schemas.placement import ReleaseJob
from slackwater.schemas.telemetry import LinkTimes
from slackwater.services.controller import network

MB = 1_000_000
BUDGET = 100 * MB
COSTS = [0.001, 0.001]
"""So little CPU time that any number of jobs could share an aggregator."""


def machines(
    aggregators: int, per_machine: int = 2, budget: int = BUDGET, **config: float
) -> Harness:
    """`per_machine` aggregators on each machine, with equal links."""
    pool = Pool(aggregators)
    pool.nodes = {f"a{n}": f"m{n // per_machine}" for n in range(aggregators)}
    pool.network_budget_bytes_s = budget
    return Harness(pool, **config)


def nodes_of(harness: Harness, id: str) -> set[str]:
    return {harness.pool.nodes[home] for home in harness.homes(id)}


def test_four_jobs_that_fit_by_cpu_are_packed_where_links_are_not_known() -> None:
    """The contrast to the next test: on two of eight aggregators by the paper's scheme."""
    harness = machines(8, budget=0)
    for n in range(4):
        harness.place(f"j{n}", COSTS, network_bytes=35 * MB)
    assert len({home for n in range(4) for home in harness.homes(f"j{n}")}) == 2


def test_gradients_do_not_load_a_link_beyond_its_budget() -> None:
    """Four jobs of 35 MB/s each, links of 100 MB/s of which 80 % may be filled: two a machine."""
    harness = machines(8)
    for n in range(4):
        harness.place(f"j{n}", COSTS, network_bytes=35 * MB)
    where = [nodes_of(harness, f"j{n}") for n in range(4)]
    loads = {node: sum(35 * MB for each in where if each == {node}) for node in ("m0", "m1")}
    assert loads == {"m0": 70 * MB, "m1": 70 * MB}
    assert [harness.stored[f"j{n}"].phase for n in range(4)] == ["steady"] * 4


def test_jobs_of_one_machine_load_no_link() -> None:
    """Their profile has no bytes over a network."""
    harness = machines(8)
    for n in range(4):
        harness.place(f"j{n}", COSTS)
    assert len({home for n in range(4) for home in harness.homes(f"j{n}")}) == 2


def test_a_job_stays_where_it_was_profiled_where_nothing_else_has_room() -> None:
    """The machine carries it already: that is not refused, it shares with nobody."""
    harness = machines(4)
    harness.place("one", COSTS, network_bytes=60 * MB)
    harness.place("two", COSTS, network_bytes=60 * MB)
    assert nodes_of(harness, "one") == {"m0"}
    assert nodes_of(harness, "two") == {"m1"}
    assert harness.stored["two"].phase == "steady"


def test_a_job_that_was_profiled_on_a_full_machine_gets_aggregators_of_another() -> None:
    """Four aggregators a machine: what the third job was measured on is on the first one, too."""
    harness = machines(8, per_machine=4)
    for n in range(3):
        harness.place(f"j{n}", COSTS, network_bytes=35 * MB)
    assert [nodes_of(harness, f"j{n}") for n in range(3)] == [{"m0"}, {"m0"}, {"m1"}]
    assert set(harness.homes("j0")) >= set(harness.homes("j1")), "two share"
    assert harness.stored["j2"].phase == "steady"
    harness.pass_time(5)
    given = set(harness.pool.records)
    assert given == set(harness.homes("j0")) | set(harness.homes("j2")), "the others are given back"


def test_where_no_others_are_to_be_had_it_stays_on_the_full_machine() -> None:
    """Its link carries the job already: then it may as well share there."""
    harness = machines(4, per_machine=4)
    for n in range(3):
        harness.place(f"j{n}", COSTS, network_bytes=35 * MB)
    assert harness.stored["j2"].phase == "profiling"
    harness.pass_time(20)
    harness.migrated("j2")
    assert harness.stored["j2"].phase == "steady"
    assert nodes_of(harness, "j2") == {"m0"}


def test_other_traffic_counts_by_its_median_and_our_own_does_not() -> None:
    """Paging of 50 MB/s beside a job of 30 MB/s: the windows say what of the link's 80 is the
    job's. A burst of a few seconds does not count."""
    harness = machines(4)
    harness.place("one", COSTS, network_bytes=30 * MB)
    node = NodeId("m0")
    links = tuple(
        LinkTimes(aggregator=AggregatorId(home), pushed_bytes=30 * MB * 10 // 2, pulled_bytes=1)
        for home in harness.homes("one")
    )
    harness.window("one", 1.0, iterations=10, times=1, spanned_s=10.0, links=links)
    harness.pool.carried_bytes_s = {"m0": 80 * MB}
    harness.pass_time(30)
    others = harness.core.state.links.others_bytes_s(node)
    assert others == pytest.approx(50 * MB)
    harness.pool.carried_bytes_s = {"m0": 100 * MB}
    harness.pass_time(8)
    assert harness.core.state.links.others_bytes_s(node) == pytest.approx(50 * MB)
    # Paging and the first job fill the 80 that may be filled, 50 and 30.
    harness.place("two", COSTS, network_bytes=5 * MB)
    assert nodes_of(harness, "two") == {"m1"}


def test_the_reason_names_the_machine_and_the_figures() -> None:
    harness = machines(4)
    harness.place("one", COSTS, network_bytes=60 * MB)
    state = harness.core.state
    harness.place("two", COSTS, network_bytes=60 * MB)
    two = state.jobs[JobId("two")]
    found = network.Traffic(state).crowded(two, [AggregatorId("a0"), AggregatorId("a1")])
    assert sorted(found) == ["a0", "a1"]
    assert set(found.values()) == {
        "60.0 MB/s of its gradients would cross the link of m0, which carries 60.0 MB/s: at most "
        "80% of 100.0 MB/s are to be used (network_fill, network_bytes_s)"
    }


def test_an_ended_job_leaves_its_part_of_the_link() -> None:
    harness = machines(4)
    harness.place("one", COSTS, network_bytes=60 * MB)
    harness.place("two", COSTS, network_bytes=15 * MB)
    assert nodes_of(harness, "two") == nodes_of(harness, "one")
    harness.place("three", COSTS, network_bytes=15 * MB)
    assert nodes_of(harness, "three") != nodes_of(harness, "one")
    harness.ask(ReleaseJob(job="one"))
    harness.pass_time(5)
    state = harness.core.state
    three = state.jobs[JobId("three")]
    where = [AggregatorId(home) for home in harness.homes("two")]
    assert network.Traffic(state).crowded(three, where) == {}


def test_no_aggregator_is_emptied_onto_a_link_that_is_full() -> None:
    """Two machines, a job each; the one with less would be moved to the other, were it not for
    the link."""
    for network_bytes, machines_in_use in ((10 * MB, 1), (45 * MB, 2)):
        harness = machines(4)
        harness.place("gone", COSTS, network_bytes=40 * MB)
        harness.place("one", COSTS, network_bytes=38 * MB)
        harness.place("two", COSTS, network_bytes=network_bytes)
        if network_bytes > 40 * MB:
            assert nodes_of(harness, "two") == {"m1"}
        harness.ask(ReleaseJob(job="gone"))
        harness.pass_time(5)
        for id in ("one", "two"):
            harness.migrated(id)
        harness.pass_time(5)
        used = nodes_of(harness, "one") | nodes_of(harness, "two")
        assert len(used) == machines_in_use


def test_what_is_lost_goes_on_even_over_a_full_link() -> None:
    harness = machines(4)
    harness.place("one", COSTS, network_bytes=60 * MB)
    harness.place("two", COSTS, network_bytes=60 * MB)
    dead = {home for home, node in harness.pool.nodes.items() if node == "m1"}
    harness.pool.dead |= {AggregatorId(id) for id in dead}
    harness.pass_time(40, *dead)
    assert nodes_of(harness, "two") == {"m0"}
