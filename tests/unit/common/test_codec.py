"""Refusals of the codec, and their words."""

import struct

import msgspec
import pytest

from slackwater.common.base import codec, limits
from slackwater.common.base.errors import DecodeRejected, Rejected
from slackwater.schemas.base import Ok, Refused
from slackwater.schemas.job_requests import SubmitJob
from slackwater.schemas.jobs import JobRecord, JobSpec
from slackwater.schemas.telemetry import IterationsObserved
from slackwater.schemas.tensors import UpdateRule

SUBMIT = SubmitJob(spec=JobSpec(id="j1"), sender="cli")
RECORD = JobRecord(spec=JobSpec(id="j1", workers=4), state="running", submitted_s=1.5)


def packed(**fields: object) -> bytes:
    return msgspec.msgpack.encode(fields)


BOMBS = {
    "empty": b"",
    "not a map": b"\x01",
    "unknown tag": packed(t="job.explode"),
    "no tag": packed(spec={"id": "j1"}),
    "deep arrays": packed(t="job.submit")[:-1] + b"\x91" * 100_000,
    "deep arrays in an unknown field": b"\x82\xa1t\xa2ok\xa1x" + b"\x91" * 400_000 + b"\x01",
    "deep maps": b"\x81\xa1x" * 100_000,
    "4 GiB array": b"\x82\xa1t\xa2ok\xa1x\xdd\xff\xff\xff\xff",
    "4 GiB text": b"\x82\xa1t\xa2ok\xa6sender\xdb\xff\xff\xff\xff",
    "4 GiB bytes": b"\x81\xc6\xff\xff\xff\xff",
    "4 GiB map": b"\xdf\xff\xff\xff\xff",
    "4 GiB extension": b"\x81\xa1x\xc9\xff\xff\xff\xff\x01",
    "invalid UTF-8": b"\x82\xa1t\xa2ok\xa6sender\xa2\xff\xfe",
    "trailing bytes": packed(t="ok") + b"\x00",
    "truncated": packed(t="refused", reason="because")[:-3],
    "integer beyond the range": packed(t="ok", epoch=2**64 - 1),
    "negative epoch": packed(t="ok", epoch=-1),
    "wrong type": packed(t="refused", reason=7),
    "sender too long": packed(t="ok", sender="x" * 129),
    "reserved byte": b"\xc1",
}


@pytest.mark.parametrize("payload", BOMBS.values(), ids=BOMBS.keys())
def test_bombs_are_refused(payload: bytes) -> None:
    before = codec.refusals.total()
    with pytest.raises(DecodeRejected) as caught:
        codec.decode(payload, Ok | Refused | SubmitJob)
    assert "\n" not in str(caught.value)
    assert codec.refusals.total() == before + 1


@pytest.mark.parametrize(
    "payload", [b"", b"{", b'{"t":"ok"}x', b"[" * 100_000, b'{"t":"ok","sender":"\xff"}', b"\x00"]
)
def test_bad_json_is_refused(payload: bytes) -> None:
    with pytest.raises(DecodeRejected):
        codec.decode(payload, Ok, json=True)


def test_the_size_is_checked_before_anything_is_read() -> None:
    payload = packed(t="ok", x=bytes(limits.MESSAGE_BYTES_MAX))
    with pytest.raises(DecodeRejected, match="over the limit of 524288"):
        codec.decode(payload, Ok)


def test_too_large_to_send_names_the_remedy() -> None:
    many = tuple("x" * 4096 for _ in range(140))
    with pytest.raises(Rejected, match=r"SubmitJob of .* move large state over the transport"):
        codec.encode(SubmitJob(spec=JobSpec(id="j1", program=many)))


def test_unknown_fields_are_ignored() -> None:
    """A newer peer of the same version may say more."""
    payload = packed(t="job.submit", spec={"id": "j1", "colour": "blue"}, mood=[1, {"a": None}])
    assert codec.decode(payload, SubmitJob) == SubmitJob(spec=JobSpec(id="j1"))
    unreadable_name = b"\x82\xa1t\xa2ok\xa2\xff\xfe\x01"
    assert codec.decode(unreadable_name, Ok) == Ok()


@pytest.mark.parametrize("json", [False, True])
def test_a_future_version_is_refused_by_name(json: bool) -> None:
    """Even where the future message would not decode at all."""
    encode = msgspec.json.encode if json else msgspec.msgpack.encode
    for document in ({"t": "ok", "v": 2}, {"t": "job.teleport", "v": 2}, {"t": "refused", "v": 9}):
        with pytest.raises(
            DecodeRejected, match=r"schema version \d is not known here \(up to 1\)"
        ):
            codec.decode(encode(document), Ok | Refused, json=json)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("as_float32", [False, True])
def test_non_finite_floats_are_refused_with_their_path(bad: float, as_float32: bool) -> None:
    message = SubmitJob(spec=JobSpec(id="j1", update=UpdateRule(learning_rate=bad)))
    payload = msgspec.msgpack.encode(message)
    if as_float32:
        payload = payload.replace(
            b"\xcb" + struct.pack(">d", bad), b"\xca" + struct.pack(">f", bad)
        )
    with pytest.raises(DecodeRejected, match=r"\$\.spec\.update\.learning_rate"):
        codec.decode(payload, SubmitJob)


def test_a_non_finite_float_in_a_list_is_found() -> None:
    observed = IterationsObserved(
        job="j1", rank=0, first_iteration=1, durations_s=(0.5, float("inf")), location_epoch=0,
        bytes_pushed=0, bytes_pulled=0,
    )  # fmt: skip
    with pytest.raises(DecodeRejected, match=r"\$\.durations_s\[1\]"):
        codec.decode(msgspec.msgpack.encode(observed), IterationsObserved)


def test_json_by_hand_is_recognised() -> None:
    assert codec.looks_like_json(codec.encode(SUBMIT, json=True))
    assert not codec.looks_like_json(codec.encode(SUBMIT))
    assert not codec.looks_like_json(b"")


# Records in buckets ------------------------------------------------------------------------------


def test_a_record_keeps_its_epoch() -> None:
    value = codec.encode_record(RECORD, epoch=12)
    assert codec.decode_record(value, JobRecord, "j1") == (RECORD, 12)


def test_every_flipped_bit_of_a_record_is_noticed() -> None:
    """JetStream does not notice one: the checksum must, wherever it is."""
    value = codec.encode_record(RECORD, epoch=3)
    for bit in range(len(value) * 8):
        damaged = bytearray(value)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DecodeRejected, match="key j1: "):
            codec.decode_record(bytes(damaged), JobRecord, "j1")


def test_every_truncation_of_a_record_is_noticed() -> None:
    value = codec.encode_record(RECORD, epoch=3)
    for length in range(len(value)):
        with pytest.raises(DecodeRejected, match="key j1: "):
            codec.decode_record(value[:length], JobRecord, "j1")


def test_a_record_of_another_type_is_refused() -> None:
    value = codec.encode_record(RECORD.spec, epoch=3)
    with pytest.raises(DecodeRejected, match="key k: holds a JobSpec, not a JobRecord"):
        codec.decode_record(value, JobRecord, "k")


def test_a_record_too_large_to_store_is_refused() -> None:
    huge = JobRecord(spec=JobSpec(id="j1", program=tuple("x" * 4096 for _ in range(64))))
    with pytest.raises(Rejected, match=r"JobRecord of .* over the 262144 bytes of a record"):
        codec.encode_record(huge, epoch=1)


def test_refusing_is_cheap_in_memory() -> None:
    """A claimed length allocates nothing: the decoder looks at what is there first."""
    import tracemalloc

    tracemalloc.start()
    try:
        for payload in (BOMBS["4 GiB array"], BOMBS["4 GiB text"], BOMBS["4 GiB map"]):
            with pytest.raises(DecodeRejected):
                codec.decode(payload, Ok)
        assert tracemalloc.get_traced_memory()[1] < 1024 * 1024
    finally:
        tracemalloc.stop()


def test_the_checksum_covers_type_and_epoch() -> None:
    """Two envelopes with one body cannot be exchanged field by field."""
    one = msgspec.msgpack.decode(codec.encode_record(RECORD, epoch=1))
    two = msgspec.msgpack.decode(codec.encode_record(RECORD, epoch=2))
    assert one["record"] == two["record"]
    assert one["crc32"] != two["crc32"]
