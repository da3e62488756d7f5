"""Every fact that the product publishes has a sentence, and says who, what and where."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from slackwater.common.domains.facts.sentences import ROUTINE, listed, sentence
from slackwater.schemas.base import AggregatorId, ClusterId, JobId, NodeId
from slackwater.schemas.cluster import AggregatorFact, AllocationEvent
from slackwater.schemas.facts import FACTS, Fact
from slackwater.schemas.job_events import JobEvent
from slackwater.schemas.memory import SlabEvent, SpanEvent
from slackwater.schemas.placement import MigrationEvent, Profile, TensorCopyDone, WorkerDone
from slackwater.schemas.scheduling import PolicyEvent
from slackwater.schemas.telemetry import JobProfiled, WindowMeasured

ROOT = Path(__file__).resolve().parents[3]
TELLERS = {"tell", "_tell", "tell_aggregator", "_tell_loss", "_fact", "_event", "change", "end"}
"""Functions that publish a fact: a word among their arguments names it, after the thing that it is
about."""
DETAIL = {
    "aggregators": "a1,a2", "beside": "vgg19", "loss": "0.2212", "limit": "0.1", "loser": "alexnet",
    "cause": "profiled", "temporary": "", "lost": "a9", "buckets": "2", "slowdown": "3.1",
    "iteration_s": "0.12", "profiled_s": "0.2", "idle_s": "75", "job": "alexnet", "jobs": "alexnet",
    "nbytes": "4000000", "within_s": "60", "spare_s": "12", "then": "begins anew", "node": "w1",
}  # fmt: skip


def made(noun: str, fact: str) -> Any:
    """One of each, with all that its publisher says."""
    kind, job = FACTS[noun][fact], JobId("alexnet")
    a1, a2 = AggregatorId("a1"), AggregatorId("a2")
    if kind is JobEvent:
        reason = "waits for 2 worker slots: 0 of 4 free" if fact == "waiting" else "out of memory"
        return JobEvent(
            job=job, fact=fact, at_s=1.0, cluster=ClusterId("c1"), reason=reason, detail=DETAIL
        )
    if kind is JobProfiled:
        profile = Profile(iteration_s=0.1, task_cpu_s=(0.01, 0.02), iterations=40)
        return JobProfiled(job=job, location_epoch=1, profile=profile)
    if kind is WindowMeasured:
        return WindowMeasured(
            job=job, location_epoch=1, last_iteration=90, iterations=32, iteration_s=0.13
        )
    if kind is PolicyEvent:
        return PolicyEvent(pool="gpus", fact=fact, policy="srsf", before="fifo", at_s=1.0)
    if kind is AllocationEvent:
        return AllocationEvent(
            aggregator=a1, fact=fact, cluster=ClusterId("c1"), in_use=3, at_s=1.0  # type: ignore[arg-type]
        )  # fmt: skip
    if kind is AggregatorFact:
        return AggregatorFact(
            aggregator=a1, fact=fact, cluster=ClusterId("c1"), at_s=1.0, detail=DETAIL
        )
    if kind is MigrationEvent:
        return MigrationEvent(
            migration="m1", job=job, fact=fact, cause="reverted", buckets=(0,),  # type: ignore[arg-type]
            sources=(a1,), targets=(a2,), at_s=1.0,
        )  # fmt: skip
    if kind is TensorCopyDone:
        return TensorCopyDone(
            migration="m1", job=job, bucket=0, location_epoch=2, version=9, source=a1, target=a2,
            nbytes=4_000_000, copy_s=0.01,
        )  # fmt: skip
    if kind is WorkerDone:
        return WorkerDone(job=job, bucket=0, location_epoch=2, target=a2)
    if kind is SlabEvent:
        return SlabEvent(
            slab="s1-1", fact=fact, lender="s1", device="d1", span=4, took_s=0.2, reason="the head "  # type: ignore[arg-type]
            "room was needed", at_s=1.0,
        )  # fmt: skip
    assert kind is SpanEvent
    return SpanEvent(
        device="d1", span=4, fact=fact, lender="s1", reason="no answer", took_s=0.2, at_s=1.0  # type: ignore[arg-type]
    )  # fmt: skip


def known() -> Iterator[tuple[str, str]]:
    for noun, facts in FACTS.items():
        for fact in facts:
            yield noun, fact


@pytest.mark.parametrize(("noun", "fact"), list(known()), ids=lambda word: word)
def test_every_fact_has_a_sentence(noun: str, fact: str) -> None:
    """It begins with what it is about, is one line, and is not what stands in for unknown facts."""
    text = sentence(made(noun, fact))
    about = {
        "job": "alexnet",
        "aggregator": "a1",
        "migration": "alexnet",
        "device": "d1",
        "policy": "gpus",
    }
    assert text.startswith(about.get(noun, "slab s1-1 of s1"))
    assert "\n" not in text
    assert "  " not in text
    assert len(text) < 200
    assert not text.endswith((f" {fact}: {made(noun, fact)}", ":", ",", " "))


def test_all_types_of_facts_are_told() -> None:
    kinds = {kind for facts in FACTS.values() for kind in facts.values()}
    assert kinds == set(get_args(Fact))
    assert {fact for facts in FACTS.values() for fact in facts} >= ROUTINE


def published() -> Iterator[tuple[str, str]]:
    """Words that the services' code hands to whatever publishes facts, and where."""
    for path in [
        *(ROOT / "services").rglob("*.py"),
        *(ROOT / "src/slackwater/memory").glob("*.py"),
    ]:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            place = f"{path.relative_to(ROOT)}:{node.lineno}"
            if name == "event" and len(node.args) == 3:
                words = node.args[2:]
            elif name in TELLERS:
                words = node.args[1:]
            else:
                continue
            for word in words:
                if isinstance(word, ast.Constant) and isinstance(word.value, str) and word.value:
                    yield word.value, place
                    break


def test_every_fact_that_is_published_is_known() -> None:
    """A new fact of a service must be listed, and so gets its sentence."""
    words = {fact for facts in FACTS.values() for fact in facts}
    found = dict(published())
    unknown = {word: place for word, place in found.items() if word not in words}
    assert not unknown, "list it in schemas/facts.py, and give it a sentence"
    assert len(found) > 30, "the search finds what is published"


def test_what_operators_ask_about_is_said() -> None:
    said = {fact: sentence(made("job", fact)) for fact in FACTS["job"]}
    assert said["reverted"] == (
        "alexnet runs 22.1% slower than alone (limit 10%): bursts of vgg19 on a1 and a2 hurt it"
    )
    assert said["running"] == "alexnet runs on w1"
    assert said["waiting"] == "alexnet waits for 2 worker slots: 0 of 4 free"
    assert said["failed"] == "alexnet failed (out of memory)"
    assert sentence(made("migration", "finished")) == (
        "alexnet is moved from a1 to a2 while it trains, to leave those whom sharing hurts"
    )
    assert sentence(made("aggregator", "late")).startswith(
        "a1 is not empty in time: 4.0 MB of alexnet are there; what is left begins anew"
    )


def test_a_job_that_runs_again_is_told_as_such() -> None:
    for reason, told in (("", "j1 is submitted"), ("runs again: this is its run 2", None)):
        fact = JobEvent(job=JobId("j1"), fact="pending", at_s=1.0, reason=reason)
        assert sentence(fact) == (told or f"j1 {reason}")
    assert sentence(JobEvent(job=JobId("j1"), fact="deleted", at_s=1.0)) == "j1 is deleted"


def test_a_job_that_is_paused_and_goes_on_elsewhere_is_told_with_its_gpus() -> None:
    def told(fact: str, reason: str = "", **held: int) -> str:
        allocation = tuple((NodeId(node), number) for node, number in held.items())
        made = JobEvent(
            job=JobId("j1"), fact=fact, at_s=1.0, attempt=2, allocation=allocation, reason=reason
        )
        return sentence(made)

    assert told("starting", n1=4) == "j1 starts on n1"
    assert told("running", n1=4, n2=2) == "j1 runs on n1 (4) and n2 (2)"
    assert told("stopping", "its GPUs go to other jobs") == (
        "j1 is told to save and to stop: its GPUs go to other jobs"
    )
    assert told("paused") == "j1 is paused"
    assert told("resized", n1=2, n2=2) == "j1 is resized on n1 (2) and n2 (2)"


def test_a_fact_of_a_newer_version_is_told_by_its_own_words() -> None:
    fact = JobEvent(job=JobId("j1"), fact="juggled", at_s=1.0, detail={"balls": "3", "none": ""})
    assert sentence(fact) == "j1 juggled: balls 3"
    bad = JobEvent(job=JobId("j1"), fact="reverted", at_s=1.0, detail={"loss": "much"})
    assert "j1 runs 0.0% slower" in sentence(bad)


def test_names_are_listed_as_one_would_say_them() -> None:
    assert [listed(each) for each in ((), ("a",), ("a", "b"), ("a", "b", "c"))] == [
        "", "a", "a and b", "a, b and c",
    ]  # fmt: skip
