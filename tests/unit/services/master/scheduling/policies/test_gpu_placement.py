"""Placement: the integer programme's optima, PACKLIMIT from history, few machines or holes."""

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from slackwater.loadgen.simulator.gpu.cluster import Cluster
from slackwater.loadgen.simulator.gpu.workload import SKEWS
from slackwater.schemas.base import JobId
from slackwater.services.master.scheduling.policies.placement import (
    PACK_LIMIT,
    Observation,
    Placer,
    learn_pack_limit,
    plan_ilp,
)
from slackwater.services.master.scheduling.policies.tiresias import Notes, TiresiasLas
from slackwater.services.master.scheduling.view import JobView, View


@pytest.mark.parametrize(
    ("workers", "servers", "free", "traffic", "optimum"),
    [
        (2, (3, 1), (2, 2), (0, 0), 0),
        (2, (3, 1), (1, 1), (0, 0), 4),
        (2, (3, 1), (2, 2), (5, 0), 5),
        (2, (3, 1), (1, 1, 2), (1, 0, 0), 1),
    ],
)
def test_ilp_optima(
    workers: int, servers: tuple[float, ...], free: tuple[int, ...], traffic: tuple[float, ...],
    optimum: float,
) -> None:  # fmt: skip
    plan = plan_ilp(workers, servers, free, traffic)
    assert plan is not None
    assert plan.max_traffic == pytest.approx(optimum)
    assert sum(plan.workers) == workers
    assert max_traffic(plan.workers, plan.server_nodes, servers, traffic) == pytest.approx(optimum)


def max_traffic(
    workers: tuple[int, ...], hosts: tuple[int, ...], servers: tuple[float, ...],
    traffic: tuple[float, ...],
) -> float:  # fmt: skip
    """The paper's T_i, straight from its formula."""
    model, total = sum(servers), sum(workers)
    loads = []
    for i, w in enumerate(workers):
        here = sum(size for size, host in zip(servers, hosts, strict=True) if host == i)
        loads.append(traffic[i] + w * (model - here) + here * (total - w))
    return max(loads)


def test_ilp_without_room() -> None:
    assert plan_ilp(3, (1,), (1, 1), (0, 0)) is None


def test_pack_limit_before_history_splits_table_3_3() -> None:
    sensitive = {"vgg19", "vgg16", "vgg11", "alexnet"}
    assert {model for model, skew in SKEWS.items() if skew > PACK_LIMIT} == sensitive


def test_pack_limit_is_learned_from_history() -> None:
    """Here even ResNet-like skews suffer, so the border moves below them."""
    history = [Observation(0.7, 0.5), Observation(0.1, 0.6), Observation(0.04, 1.0)]
    assert learn_pack_limit(history) == pytest.approx(0.07)
    assert learn_pack_limit([]) == PACK_LIMIT


@given(st.lists(st.tuples(st.floats(0.01, 0.99), st.floats(0.2, 1.0)), min_size=1, max_size=30))
@example([(0.01, 1.0), (0.010000000000000002, 0.5)])
@example([(0.010000000000000002, 1.0), (0.010000000000000004, 0.5)])
def test_learned_pack_limit_errs_least(points: list[tuple[float, float]]) -> None:
    history = [Observation(*point) for point in points]
    limit = learn_pack_limit(history)

    def errors(border: float) -> int:
        return sum((o.skew > border) != (o.relative_speed < 0.95) for o in history)

    best = min(errors(border / 1000) for border in range(1001))
    assert errors(limit) <= best


@given(
    nodes=st.lists(st.integers(1, 8), min_size=2, max_size=6),
    used=st.lists(st.integers(0, 8), min_size=2, max_size=6),
    skew=st.sampled_from([0.0, 0.04, 0.71]),
    speed=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_only_what_fewer_machines_could_hold_is_learned_from(
    nodes: list[int], used: list[int], skew: float, speed: float
) -> None:
    """Acceptance: an observation needs len(allocation) > ceil(gpus / node_gpus_max), a skew and a
    speed that are known."""
    taken = [(i, min(n, u)) for i, (n, u) in enumerate(zip(nodes, used, strict=False))]
    allocation = tuple((i, gpus) for i, gpus in taken if gpus)
    gpus = sum(count for _, count in allocation)
    job = JobView(
        id=JobId("j"), number=0, submitted_s=0, gpus=max(1, gpus), gpus_min=1, gpus_max=64,
        skew=skew, speed=speed, allocation=allocation,
    )  # fmt: skip
    view = View(0, Cluster([(n, "") for n in nodes]).view, {job.id: job}, [0] * len(nodes))
    notes = Notes()
    TiresiasLas()._observe(view, notes)
    spread = len(allocation) > max(1, -(-gpus // max(nodes)))
    assert bool(notes.observations) == (spread and skew > 0 and speed > 0)


def placer(nodes: list[int], free: list[int]) -> Placer:
    cluster = Cluster([(gpus, "") for gpus in nodes])
    return Placer(View(0, cluster.view, {}, free))


def by_turns(processes: int) -> JobView:
    return JobView(
        id=JobId("t"), number=0, submitted_s=0, gpus=processes, gpus_min=processes,
        gpus_max=processes, one_each=True,
    )  # fmt: skip


def test_elastic_jobs_that_take_turns_have_a_process_on_each_of_the_same_machines() -> None:
    several = placer([4, 4, 4], [4, 4, 4])
    for _ in range(4):
        assert several.place_job(by_turns(2), "", "require") == ((0, 1), (1, 1))
    assert several.place_job(by_turns(2), "", "require") == ((2, 2),)
    assert placer([4, 4], [4, 1]).place_job(by_turns(4), "", "require") == ((0, 3), (1, 1))
    assert placer([4, 4], [1, 1]).place_job(by_turns(3), "", "require") == ()
    assert placer([4], [4]).place_job(by_turns(3), "", "require") == ((0, 3),)
    asks = msgspec.structs.replace(by_turns(2), memory_bytes=1)
    assert placer([4, 4], [4, 4]).place_job(asks, "", "require") == ((0, 1), (1, 1))


def test_jobs_that_may_lie_anywhere_do_where_one_machine_is_too_small() -> None:
    job = msgspec.structs.replace(by_turns(3), one_each=False, anywhere=True)
    assert placer([4, 4], [4, 4]).place_job(job, "", "require") == ((0, 3),)
    assert placer([4, 4], [2, 2]).place_job(job, "", "require") == ((0, 2), (1, 1))
    meets = msgspec.structs.replace(job, anywhere=False)
    assert placer([4, 4], [2, 2]).place_job(meets, "", "require") == ()


def test_few_machines() -> None:
    assert placer([4, 4, 4], [2, 4, 3]).place(3) == ((2, 3),), "the tightest single machine"
    assert placer([4, 4, 4], [2, 4, 3]).place(6) == ((0, 2), (1, 4))
    assert placer([4, 4, 4], [2, 2, 2]).place(4, mode="require") == ()
    assert placer([4, 4, 4], [2, 2, 2]).place(7) == ()


def test_holes_first() -> None:
    assert placer([4, 4, 4], [1, 4, 2]).place(3, mode="no") == ((0, 1), (2, 2))


@given(
    st.lists(st.integers(0, 8), min_size=1, max_size=8),
    st.integers(1, 20),
    st.sampled_from(["prefer", "no", "require"]),
)
def test_placements_fit(free: list[int], gpus: int, mode: str) -> None:
    found = placer([8] * len(free), free).place(gpus, mode=mode)
    if found:
        assert sum(count for _, count in found) == gpus
        assert all(0 < count <= free[node] for node, count in found)
        assert [node for node, _ in found] == sorted({node for node, _ in found})
    else:
        assert mode == "require" or sum(free) < gpus
