"""Histograms of requests' times: percentiles near the true ones, nothing lost between threads."""

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackwater.memory.pages import latency


@given(st.integers(0, 2**45))
def test_a_time_lies_below_the_bound_of_its_bucket_and_not_below_the_last_one(ns: int) -> None:
    at = latency.bucket(ns)
    assert 0 <= at < latency.BUCKETS
    assert ns < latency.bound_ns(at) or at == latency.BUCKETS - 1
    assert at == 0 or ns >= latency.bound_ns(at - 1)


@given(st.lists(st.integers(1_500, 10**9), min_size=1), st.sampled_from([0.5, 0.9, 0.99, 1.0]))
def test_percentiles_are_right_to_a_quarter(times: list[int], share: float) -> None:
    counted = latency.histogram()
    for ns in times:
        latency.add(counted, latency.DISK, ns, 1)
    true_ns = sorted(times)[math.ceil(share * len(times)) - 1]
    found_ns = latency.percentile_us(counted[latency.DISK].tolist(), share) * 1e3
    assert true_ns < found_ns <= 1.25 * true_ns


def test_causes_without_requests_are_left_out() -> None:
    counted = latency.histogram()
    latency.add(counted, latency.HIT, 3_000, 98)
    latency.add(counted, latency.HIT, 3_000_000, 2)
    [info] = latency.infos(counted)
    assert (info.cause, info.requests, info.p50_us) == ("hit", 100, 3.072)
    assert info.p99_us == pytest.approx(3000, rel=0.25)


def test_what_ended_connections_counted_stays_counted() -> None:
    all_ = latency.Latencies()
    opened = [all_.open() for _ in range(3)]
    for i, one in enumerate(opened):
        latency.add(one, latency.WRITE, 5_000, i + 1)
    all_.close(opened[1])
    latency.add(all_.loop, latency.WRITE, 5_000, 10)
    assert all_.total()[latency.WRITE].sum() == 16


def test_recent_times_are_those_of_the_last_ten_seconds() -> None:
    """Looked at each second: what was counted at second s shows from then on for ten, and less
    than two more."""
    all_ = latency.Latencies()
    rng = random.Random(1)
    counted = []
    for second in range(60):
        count = rng.randrange(5)
        counted.append(count)
        latency.add(all_.loop, latency.HIT, 2_000, count)
        found = int(all_.recent(float(second))[latency.HIT].sum())
        least = sum(counted[max(0, second - 9) :])
        most = sum(counted[max(0, second - 11) :])
        assert least <= found <= most, second


def test_looking_often_forgets_no_second() -> None:
    all_ = latency.Latencies()
    for tick in range(3000):
        now_s = tick / 100
        latency.add(all_.loop, latency.HIT, 2_000, 1)
        found = int(all_.recent(now_s)[latency.HIT].sum())
        assert min(tick, 1000) <= found <= 1100
    assert not np.any(all_.total()[latency.LATE])
