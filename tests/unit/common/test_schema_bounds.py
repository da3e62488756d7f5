"""Bounds of messages: ids that are ids, numbers that can be reckoned with and stored. Each of these
once reached a core, and ended it or its service's next start."""

from json import dumps
from typing import Any

import msgspec
import pytest

from slackwater.common.base import codec
from slackwater.common.base.errors import DecodeRejected, Rejected
from slackwater.common.domains.slots.frames import Hello, decode, decode_hello, encode_hello
from slackwater.schemas import subjects
from slackwater.schemas.base import REASON_CHARS_MAX, AggregatorId, Message, Refused
from slackwater.schemas.cluster import (
    AggregatorHeartbeat,
    AggregatorRecord,
    AllocateAggregators,
    Heartbeat,
    TenantUse,
    WorkerHeartbeat,
)
from slackwater.schemas.job_events import JobEvent
from slackwater.schemas.job_requests import RegisterJob
from slackwater.schemas.jobs import JobRecord, JobSpec
from slackwater.schemas.placement import HostBuckets, MigrateInit, PlaceJob
from slackwater.schemas.tensors import ELEMENTS_MAX
from slackwater.schemas.workers import StartWorkers, StopWorkers, WorkerExited
from slackwater.services.controller.policies.demand import slack_s

HEARTBEAT = {"service": "x", "id": "w1", "incarnation": 1, "at_s": 1.0}
WORKER = {**HEARTBEAT, "node": "n1", "slots": 1}
SPEC = {"id": "j1"}


def tensors(*shapes: tuple[int, ...]) -> list[dict[str, Any]]:
    return [{"name": f"t{n}", "shape": shape} for n, shape in enumerate(shapes)]


def start(ranks: list[int]) -> dict[str, Any]:
    return {"job": "j1", "ranks": ranks, "workers": 2, "program": ["true"]}


def allocate(job: str) -> dict[str, Any]:
    return {"request": "r1", "cluster": "c1", "count": 1, "temporary_for": job}


def exited(code: int) -> dict[str, Any]:
    return {"job": "j1", "rank": 0, "node": "n1", "code": code}


REFUSED: list[tuple[str, type[Message], dict[str, Any], str]] = [
    ("a tensor of 2^60 elements", RegisterJob,
     {"job": "j1", "rank": 0, "tensors": tensors((2**30, 2**30))}, r"tensors: 1152\d+ elements"),
    ("elements beyond 64 bits", RegisterJob,
     {"job": "j1", "rank": 0, "tensors": tensors((2**40, 2**40, 2**40))}, "at most 4398046511104"),
    ("tensors that are too many together", PlaceJob,
     {"spec": SPEC, "tensors": tensors((2**42,), (2,))}, "train them in several"),
    ("a loss limit of everything", PlaceJob,
     {"spec": SPEC, "tensors": tensors((2,)), "loss_limit": 1.0}, r"\$\.loss_limit"),
    ("a job's own loss limit of everything", PlaceJob,
     {"spec": {**SPEC, "loss_limit": 1.0}, "tensors": tensors((2,))}, r"\$\.spec\.loss_limit"),
    ("a policy's name with blanks", PlaceJob,
     {"spec": {**SPEC, "aggregation": "a b"}, "tensors": tensors((2,))}, r"\$\.spec\.aggregation"),
    ("one rank twice", StartWorkers, start([0, 0]), "name each rank once"),
    ("a rank that is not an index", StartWorkers, start([2**40]), r"\$\.ranks"),
    ("a temporary for nobody's id", AllocateAggregators, allocate("not an id"), "temporary_for"),
    ("an exit code beyond 64 bits", WorkerExited, exited(2**70), r"\$\.code"),
    ("an exit code beyond 32 bits", WorkerExited, exited(2**31), r"\$\.code"),
    ("a heartbeat without an id", Heartbeat, {**HEARTBEAT, "id": ""}, r"\$\.id"),
    ("a heartbeat of no id", WorkerHeartbeat, {**WORKER, "id": "a.b"}, r"\$\.id"),
    ("a heartbeat of a wildcard", AggregatorHeartbeat, {**HEARTBEAT, "id": ">"}, r"\$\.id"),
    ("an id with a line feed", StopWorkers, {"job": "j1\n"}, r"\$\.job"),
    ("no such bucket", MigrateInit,
     {"cluster": "c", "migration": "m", "job": "j", "buckets": [20_000], "epochs": [1],
      "to": {"aggregator": "a", "addresses": []}}, r"\$\.buckets"),
    ("an epoch that cannot be raised", HostBuckets,
     {"cluster": "c", "at_epochs": [2**53], "tensors": tensors((2,)), "buckets": [],
      "plan": {"job": "j", "workers": 1, "gradient_dtype": "float32", "update": {},
               "layout_epoch": 1, "token": ""}}, r"\$\.at_epochs"),
]  # fmt: skip


@pytest.mark.parametrize("json", [False, True], ids=["msgpack", "json"])
@pytest.mark.parametrize(("what", "kind", "fields", "why"), REFUSED, ids=[r[0] for r in REFUSED])
def test_a_message_that_no_core_can_take_is_refused_by_its_decoder(
    what: str, kind: type[Message], fields: dict[str, Any], why: str, json: bool
) -> None:
    tree = {"t": kind.__struct_config__.tag, **fields}
    if json:
        payload = dumps(tree).encode()  # msgspec itself writes no such number.
    else:
        try:
            payload = msgspec.msgpack.encode(tree)
        except OverflowError:
            return  # msgpack itself has no such number.
    with pytest.raises(DecodeRejected, match=why):
        codec.decode(payload, kind, json=json)


def test_the_largest_tensor_can_still_be_reckoned_with() -> None:
    fields = {"t": "job.register", "job": "j", "rank": 0, "tensors": tensors((ELEMENTS_MAX,))}
    register = codec.decode(msgspec.msgpack.encode(fields), RegisterJob)
    assert register.tensors[0].shape == (ELEMENTS_MAX,)
    assert 0.0 < slack_s(1e10, 0.999) < 1e14


@pytest.mark.parametrize("id", ["a\n", "a.b", "", "*", "x" * 64])
def test_a_subject_is_built_of_ids_only(id: str) -> None:
    with pytest.raises(ValueError, match="cannot be part of a subject"):
        subjects.command("worker", id, "start")


def test_a_record_is_checked_when_it_is_written_as_strictly_as_when_it_is_read() -> None:
    """The refusal names field and value, and nothing was stored."""
    bad = AggregatorRecord(id=AggregatorId("a1"), temporary_for="not an id")  # type: ignore[arg-type]
    with pytest.raises(Rejected, match=r"\$\.temporary_for.*, not 'not an id'"):
        codec.encode_record(bad, 1)
    endless = JobRecord(spec=JobSpec(id="j"), started_s=float("nan"))
    with pytest.raises(Rejected, match=r"\$\.started_s"):
        codec.encode_record(endless, 1)
    large = JobRecord(spec=JobSpec(id="j", seed=2**70))
    with pytest.raises(Rejected, match="JobRecord cannot be stored"):
        codec.encode_record(large, 1)


def test_a_message_that_cannot_be_encoded_is_refused_not_an_exception() -> None:
    with pytest.raises(Rejected, match="WorkerExited cannot be encoded"):
        codec.encode(WorkerExited(job="j", rank=0, node="n", code=2**70))  # type: ignore[arg-type]


def test_texts_put_together_out_of_others_are_cut_to_what_readers_take() -> None:
    refused = Refused(reason="it cannot be started: " + "x" * 4096)
    assert len(refused.reason) == REASON_CHARS_MAX
    record = JobRecord(spec=JobSpec(id="j"), reason=f"it cannot be started: {'x' * 4096}")
    assert codec.decode_record(codec.encode_record(record, 1), JobRecord, "j")[0] == record
    everywhere = ",".join(f"aggregator-{n}" for n in range(1024))
    event = JobEvent(job="j", fact="steady", at_s=1.0, detail={"at": everywhere})  # type: ignore[arg-type]
    assert codec.decode(codec.encode(event), JobEvent) == event


def test_a_sum_of_odd_figures_does_not_cost_the_whole_report() -> None:
    odd = TenantUse(tenant="t", jobs=1, cpu=1e15, loss=float("-inf"))
    total = odd + odd
    assert codec.decode(msgspec.msgpack.encode(total), TenantUse) == total


@pytest.mark.parametrize("text", ["x" * 4000, "a\nb " * 1000])
def test_a_refused_hello_or_frame_does_not_quote_the_peer_s_text_whole(text: str) -> None:
    hello = msgspec.msgpack.encode({"t": text, "role": text})
    for refuse in (lambda: decode_hello(hello), lambda: list(decode(b"\x03\0\x01\0" + hello))):
        with pytest.raises(DecodeRejected) as error:
            refuse()
        assert len(str(error.value)) <= 300
        assert "\n" not in str(error.value)
    with pytest.raises(DecodeRejected, match=r"\$\.sender"):
        decode_hello(encode_hello(Hello(role="agent", sender="x" * 4096)))
