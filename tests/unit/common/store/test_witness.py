"""The witness of a bucket: what it proves of a store that lost something, and of its own file."""

import os
import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackwater.common.store import witness_file
from slackwater.common.store.witness import NAMED_MAX, Content, Found, Mark, Told, compared, listed
from slackwater.common.store.witness_file import (
    FileWitness,
    FolderWitnesses,
    MemoryWitness,
    Noted,
    _read,
    parsed,
)

FILE_BYTES: Final = 64 * 1024


@dataclass(frozen=True)
class Write:
    key: str
    value: bytes | None
    sequence: int
    mark: Mark


@dataclass
class Stream:
    """A bucket as a slow, obvious server has it: the list of all writes that were acknowledged."""

    epoch: int = 1
    writes: list[Write] = field(default_factory=list)
    content: Content = field(default_factory=Content)

    def write(self, key: str, value: bytes | None) -> Write:
        self.content.write(key, value)
        sequence = len(self.writes) + 1
        mark = self.content.mark(self.epoch, sequence)
        self.writes.append(Write(key, value, sequence, mark))
        return self.writes[-1]

    def found(self, kept: list[Write], last: int) -> Found:
        """Return what is read where the server has these writes."""
        live: dict[str, bytes] = {}
        for each in kept:
            if each.value is None:
                live.pop(each.key, None)
            else:
                live[each.key] = each.value
        mark = kept[-1].mark if kept else None
        return Found(self.epoch if kept else 0, last, Content(live), mark)

    def told(self, count: int) -> Told:
        """Return the writer's file after so many writes."""
        if not count:
            return Told()
        digests = dict[str, str]()
        for each in self.writes[:count]:
            if each.value is None:
                digests.pop(each.key, None)
            else:
                digests[each.key] = f"{Content({each.key: each.value}).digest}"
        return Told(self.writes[count - 1].mark, digests)


def filled(seed: int, count: int) -> Stream:
    stream, rng = Stream(), random.Random(seed)
    for number in range(count):
        key = f"k{rng.randrange(count // 3 + 1)}"
        gone = rng.random() < 0.2 and key in stream.content.digests
        stream.write(key, None if gone else b"%d" % number)
    return stream


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.none() | st.binary(max_size=3))))
def test_content_is_that_of_the_records_however_they_came(
    writes: list[tuple[str, bytes | None]],
) -> None:
    content, model = Content(), dict[str, bytes]()
    for key, value in writes:
        content.write(key, value)
        if value is None:
            model.pop(key, None)
        else:
            model[key] = value
        assert content.mark(1, 1) == Content(model).mark(1, 1)


@given(st.tuples(*[st.integers(0, 2**63)] * 3), st.integers(0, 2**128 - 1))
def test_a_mark_is_read_as_it_was_written(numbers: tuple[int, int, int], digest: int) -> None:
    mark = Mark(*numbers, f"{digest:032x}")
    assert Mark.parsed(mark.text()) == mark


@pytest.mark.parametrize(
    "text", ["", "1 2 3", "1 2 3 4", "-1 2 3 " + "0" * 32, "1 2 x " + "0" * 32]
)
def test_a_header_that_is_no_mark_says_nothing(text: str) -> None:
    assert Mark.parsed(text) is None


# Losses of a store --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_a_stream_that_was_cut_off_anywhere_is_found_out(seed: int) -> None:
    """By the file alone, and by peers alone; a stream that is whole never is."""
    stream = filled(seed, 60)
    newest = stream.writes[-1].mark
    for kept in range(61):
        found = stream.found(stream.writes[:kept], kept)
        for told, peers in ((stream.told(60), ()), (Told(), (newest,))):
            verdict = compared(found, told, peers)
            assert bool(verdict.missing) is (kept < 60)
            assert not verdict.note


@pytest.mark.parametrize("seed", range(5))
def test_a_record_that_is_left_out_is_found_out_by_the_marks_in_the_bucket(seed: int) -> None:
    """The last one but moves the end of the stream: the file knows where it was."""
    stream = filled(seed, 60)
    live = {each.key: each for each in stream.writes if each.value is not None}
    for key in stream.content.digests:
        kept = [each for each in stream.writes if each is not live[key]]
        before = any(each.key == key and each.value is not None for each in kept)
        found = stream.found([each for each in kept if each.key != key], 60)
        verdict = compared(found, stream.told(60), ())
        assert f"missing: {key}" in verdict.missing, before
        if live[key].sequence < 60:
            assert compared(found, Told(), ()).missing, "without the file"


def test_what_is_missing_is_named() -> None:
    stream = Stream()
    for number in range(14):
        stream.write(f"job{number:02}", b"x")
    stream.write("job00", b"y")
    verdict = compared(stream.found(stream.writes[:2], 2), stream.told(15), ())
    assert verdict.missing == (
        "write 15 of epoch 1 was acknowledged, with 14 records; the last write that is there is 2 "
        "of epoch 1, with 2 records (missing: job02, job03, job04, job05, job06, job07, job08, "
        "job09, job10, job11 and 2 more; older than it was: job00)"
    )


def test_a_witness_that_is_behind_is_no_fault() -> None:
    """The file was not written before a kill, or another host's instance wrote since."""
    stream = filled(1, 60)
    whole = stream.found(stream.writes, 60)
    for count in range(61):
        assert compared(whole, stream.told(count), ()) == ("", "")
    later = Found(5, 9, whole.content, Mark(5, 9, *whole.content.mark(0, 0)[2:]))
    assert compared(later, stream.told(60), (stream.writes[-1].mark,)) == ("", "")


def test_an_older_epoch_than_anybody_knows_is_a_loss() -> None:
    stream = filled(1, 10)
    found = stream.found(stream.writes, 10)
    assert "of epoch 4" in compared(found, Told(), (Mark(4, 3, 1, "0" * 32),)).missing


def test_a_write_without_a_mark_is_noted() -> None:
    """A person's `nats kv del`, or an older release's."""
    stream = filled(1, 10)
    found = stream.found(stream.writes, 11)
    assert "carries no mark" in compared(found, Told(), ()).note
    unknown = Found(1, 11, found.content, None)
    assert compared(unknown, Told(), ()) == ("", ""), "nothing ever had a mark"


def test_damaged_records_are_counted_and_not_compared() -> None:
    stream = Stream()
    stream.write("a", b"1")
    stream.write("b", b"2")
    changed = Content({"a": b"1", "b": b"3"})
    found = Found(1, 2, changed, stream.writes[-1].mark, frozenset("b"))
    assert compared(found, stream.told(2), ()) == ("", "")
    fewer = Found(1, 2, Content({"b": b"3"}), stream.writes[-1].mark, frozenset("b"))
    assert "missing: a" in compared(fewer, stream.told(2), ()).missing


@pytest.mark.slow
def test_every_flipped_bit_of_a_bucket_is_found_out() -> None:
    """All 524,288 of 64 KiB of records (5 s: each is hashed)."""
    rng = random.Random(3)
    records = {f"k{number}": rng.randbytes(1024) for number in range(64)}
    content = Content(records)
    whole = content.digest
    for key, value in records.items():
        changed = bytearray(value)
        for bit in range(8 * len(value)):
            changed[bit // 8] ^= 1 << bit % 8
            content.write(key, bytes(changed))
            assert content.digest != whole
            changed[bit // 8] ^= 1 << bit % 8
        content.write(key, value)
    assert content.digest == whole


# The file -----------------------------------------------------------------------------------------


async def a_file(path: Path, stream: Stream) -> bytes:
    file = FileWitness(path)
    await file.begin({}, Mark(1, 0, 0, "0" * 32))
    for each in stream.writes:
        digest = "" if each.value is None else Content({each.key: each.value}).digest
        await file.add([Noted(each.key, digest)], each.mark)
    return path.read_bytes()  # noqa: ASYNC240 (nobody waits)


async def test_a_file_says_what_was_noted(tmp_path: Path) -> None:
    stream = filled(2, 40)
    content = await a_file(tmp_path / "b", stream)
    assert parsed(content) == await FileWitness(tmp_path / "b").read() == stream.told(40)
    memory = MemoryWitness()
    await memory.begin({}, Mark(1, 0, 0, "0" * 32))
    for each in stream.writes:
        digest = "" if each.value is None else Content({each.key: each.value}).digest
        await memory.add([Noted(each.key, digest)], each.mark)
    assert await memory.read() == stream.told(40)
    assert await FileWitness(tmp_path / "none").read() == Told()


async def test_a_file_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(witness_file, "SPARE_LINES", 64)
    file, content = FileWitness(tmp_path / "b"), Content()
    await file.begin({}, content.mark(1, 0))
    for sequence in range(1, 300):
        note = Noted("k", content.write("k", b"%d" % sequence))
        await file.add([note], content.mark(1, sequence))
    assert len((tmp_path / "b").read_bytes().splitlines()) < 64 + 6
    assert await file.read() == Told(content.mark(1, sequence), {"k": note.digest})


async def test_a_file_that_could_not_be_written_is_whole_once_it_can(tmp_path: Path) -> None:
    folder = tmp_path / "witness"
    file, content = FileWitness(folder / "b"), Content()
    await file.begin({}, content.mark(1, 0))
    (folder / "b").unlink()
    folder.rmdir()
    lost = Noted("a", content.write("a", b"1"))
    with pytest.raises(FileNotFoundError):
        await file.add([lost], content.mark(1, 1))
    after = Noted("b", content.write("b", b"2"))
    await file.add([after], content.mark(1, 2))
    assert await file.read() == Told(content.mark(1, 2), dict([lost, after]))


async def test_a_file_that_could_not_be_written_anew_is_not_added_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has grown long, and the shorter one could not take its place: it lacks what was noted."""
    monkeypatch.setattr(witness_file, "SPARE_LINES", 4)
    file, content = FileWitness(tmp_path / "b"), Content()
    await file.begin({}, content.mark(1, 0))
    notes, sequence = dict[str, str](), 0

    async def add(key: str) -> None:
        nonlocal sequence
        sequence += 1
        noted = Noted(key, content.write(key, str(sequence).encode()))
        notes[noted.key] = noted.digest
        await file.add([noted], content.mark(1, sequence))

    async def add_often() -> None:
        for _ in range(20):
            await add("k")

    def no_room(_self: Path, _target: Path) -> None:
        raise OSError("no room")

    with monkeypatch.context() as failing:
        failing.setattr(Path, "replace", no_room)
        with pytest.raises(OSError, match="no room"):
            await add_often()
    await add("other")
    assert await file.read() == Told(content.mark(1, sequence), notes)


def lines_of(content: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    for line in content.splitlines(keepends=True):
        yield at, line
        at += len(line)


@pytest.mark.slow
async def test_every_flipped_bit_and_every_cut_of_a_file_is_harmless(tmp_path: Path) -> None:
    """All 590,000 of 64 KiB (10 s: each is read). A line that was touched is unreadable, whatever
    bit it was, so that a file says the same for all of them: what it says without the line."""
    stream, size = Stream(), 0
    rng = random.Random(4)
    path = tmp_path / "b"
    while size < FILE_BYTES:
        for _ in range(300):
            stream.write(f"job{rng.randrange(80)}", rng.choice([None, b"x", b"y"]))
        size = len(await a_file(path, stream))
    content = path.read_bytes()[:FILE_BYTES]
    content = content[: content.rindex(b"\n") + 1]
    told = {each.mark for each in stream.writes} | {Mark(1, 0, 0, "0" * 32)}
    whole = stream.found(stream.writes, len(stream.writes))
    flips = cuts = 0
    for number, (at, line) in enumerate(lines_of(content)):
        body = bytearray(line.rstrip(b"\n"))
        for bit in range(8 * len(body)):
            body[bit // 8] ^= 1 << bit % 8
            assert all(_read(part) is None for part in bytes(body).split(b"\n"))
            body[bit // 8] ^= 1 << bit % 8
        after = content[at + len(line) :]
        for flipped in (1 << bit for bit in range(8)):  # The end of the line: two become one.
            merged = line[:-1] + bytes([line[-1] ^ flipped]) + after.partition(b"\n")[0]
            assert _read(merged) is None
        flips += 8 * len(line)
        for length in range(len(line) - 1):
            assert _read(line[:length]) is None
        cuts += len(line)
        for left in (content[:at], content[:at] + after) if number % 16 == 0 else ():
            read = parsed(left)
            assert read.mark is None or read.mark in told
            assert not compared(whole, read, ()).missing, "the store has lost nothing"
    assert flips + cuts > 500_000


def test_a_line_with_a_right_checksum_and_nonsense_is_left_out() -> None:
    for body in (b"", b"{}", b"[1]", b'["a"]', b"[1,2,3,4]", b"\xff", b'["a",1]', b"null"):
        read = parsed(b"%08x %s\n" % (zlib.crc32(body), body))
        assert read == Told(None, {}, 1)


async def test_a_line_is_in_the_file_before_that_is_made_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines that a program still holds in its buffer are not on the disk after fdatasync."""
    path, content = tmp_path / "b", Content()
    file, seen = FileWitness(path), list[Told]()
    await file.begin({}, content.mark(1, 0))
    sync = os.fdatasync

    def look(descriptor: int) -> None:
        sync(descriptor)
        seen.append(parsed(path.read_bytes()))

    monkeypatch.setattr(os, "fdatasync", look)
    note = Noted("a", content.write("a", b"1"))
    await file.add([note], content.mark(1, 1))
    assert seen == [Told(content.mark(1, 1), dict([note]))]


async def test_a_file_that_is_written_anew_leaves_no_descriptor_open(tmp_path: Path) -> None:
    file, content = FileWitness(tmp_path / "b"), Content()
    await file.begin({}, content.mark(1, 0))
    before = len(os.listdir("/proc/self/fd"))
    for epoch in range(2, 12):
        await file.begin({}, content.mark(epoch, 0))
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_service_without_a_folder_keeps_no_witness(tmp_path: Path) -> None:
    assert FolderWitnesses("").of("jobs") is None
    assert isinstance(FolderWitnesses(str(tmp_path)).of("jobs"), FileWitness)


def test_a_sentence_names_some_keys_and_counts_the_others() -> None:
    keys = [f"k{number}" for number in range(NAMED_MAX)]
    assert listed(keys) == ", ".join(keys)
    assert listed([*keys, "l", "m"]) == ", ".join(keys) + " and 2 more"
