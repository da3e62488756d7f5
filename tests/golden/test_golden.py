"""Messages and records of every version that was cut are read by this one, field by field."""

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.golden import kinds
from tests.golden.write import EPOCH, write

from slackwater.common.base import codec
from slackwater.schemas.base import Message, Record

VERSIONS = sorted(path.stem for path in kinds.FOLDER.glob("*.json"))


def test_the_version_at_hand_has_its_file() -> None:
    assert metadata.version("slackwater") in VERSIONS


def golden(version: str, part: str) -> dict[str, list[bytes]]:
    found = json.loads((kinds.FOLDER / f"{version}.json").read_text())[part]
    return {name: [bytes.fromhex(text) for text in texts] for name, texts in found.items()}


@pytest.mark.parametrize("version", VERSIONS)
def test_messages_of_a_version_are_understood(version: str) -> None:
    known = kinds.of(Message)
    for name, payloads in golden(version, "messages").items():
        for payload in payloads:
            holds(
                codec.decode(payload, known[kinds.RENAMED.get(name, name)]),
                msgspec.msgpack.decode(payload),
            )


@pytest.mark.parametrize("version", VERSIONS)
def test_records_of_a_version_are_understood(version: str) -> None:
    known = kinds.of(Record)
    for name, values in golden(version, "records").items():
        for value in values:
            record, epoch = codec.decode_record(value, known[name], "key")
            assert epoch == EPOCH
            holds(record, msgspec.msgpack.decode(value)["record"])


def holds(read: Any, written: dict[str, Any]) -> None:
    """Each field that was written is read as it was; fields that came later have defaults."""
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(read))
    assert {name: again.get(name) for name in written} == written


def test_a_file_is_the_same_whenever_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.golden.write.FOLDER", tmp_path)
    assert write("9.9.9").read_bytes() == write("9.9.9").read_bytes()
