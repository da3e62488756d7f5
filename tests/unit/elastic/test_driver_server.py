"""The driver's listener: whom it takes as a host, and what it does with all others."""

import os
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import eventually

from slackwater.common.base import codec
from slackwater.common.base.errors import Fatal, Rejected
from slackwater.common.base.packing import ARRAYS
from slackwater.elastic import App, Driver, Executor, Run, Ssp, Table
from slackwater.elastic import server as server_module
from slackwater.elastic.app import described
from slackwater.elastic.driver_core import SENT_MAX
from slackwater.elastic.driver_effects import Report
from slackwater.elastic.files import RunJournal
from slackwater.elastic.server import DriverServer
from slackwater.elastic.wire import HEAD, framed, release, sizes
from slackwater.schemas.base import Message
from slackwater.schemas.elastic import (
    BatchTold,
    Completion,
    Entry,
    ExecutorPlaced,
    FromDriver,
    HostHello,
    HostReady,
    HostWelcome,
    Orders,
    Over,
    RunBegun,
    RunStands,
    TakeExecutor,
    TaskFailed,
    Told,
)


class Once(App):
    executors = 1
    tables = {"w": Table(1, 1)}
    driver = Ssp(2)

    class Executor(Executor):
        def run(self, ctx: Any, task: Any) -> None:
            """Do nothing."""


def ignore(report: Report, executors: int, hosts: int) -> None:
    """Tell nobody."""


def begun(
    folder: Path, begins: bool | None = True, placement: int = 3, saved: Path | None = None
) -> DriverServer:
    server = DriverServer(
        Once(), RunJournal(folder), "j", 1, ignore, begins=begins, placement=placement, saved=saved
    )  # fmt: skip
    server.start()
    return server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[DriverServer]:
    made = begun(tmp_path)
    yield made
    made.close(within_s=0.0)


class Host:
    """The other end of a connection."""

    def __init__(self, server: DriverServer) -> None:
        self._socket = socket.create_connection(("127.0.0.1", server.port), timeout=10.0)
        self._file = self._socket.makefile("rb")

    def say(self, *messages: Message) -> None:
        for message in messages:
            self._socket.sendall(b"".join(framed(message)))

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def hear(self) -> Message | None:
        """Return the next frame; None: the connection is closed."""
        head = self._file.read(HEAD.size)
        if len(head) < HEAD.size:
            return None
        message, payload = sizes(head)
        found: Message = codec.decode(self._file.read(message), FromDriver)
        self._file.read(payload)
        return found

    def close(self) -> None:
        self._file.close()
        self._socket.close()


def hello(server: DriverServer, **fields: Any) -> HostHello:
    usual = {
        "job": "j", "rank": 0, "secret": server.secret, "release": release(),
        "program": described(Once()),
    }  # fmt: skip
    return HostHello(**{**usual, **fields})


def test_a_host_is_welcomed_gets_its_executor_and_its_order(server: DriverServer) -> None:
    host = Host(server)
    host.say(hello(server))
    assert isinstance(host.hear(), HostWelcome)
    host.say(HostReady())
    assert isinstance(host.hear(), TakeExecutor)
    orders = host.hear()
    assert isinstance(orders, Orders)
    assert [order.number for order in orders.orders] == [0]
    host.close()
    assert eventually(lambda: server.connected == 0)


class Hundred(Once):
    driver = Ssp(100)


def test_a_long_journal_is_shortened_and_the_next_driver_goes_on_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red before: its journal grew for as long as a program ran."""
    monkeypatch.setattr(server_module, "JOURNAL_LINES", 10)
    app = Hundred()

    def driver(begins: bool | None) -> DriverServer:
        made = DriverServer(app, RunJournal(tmp_path), "j", 1, ignore, begins=begins, placement=3)
        made.start()
        return made

    def next_orders(host: Host) -> list[int]:
        while not isinstance(frame := host.hear(), Orders):
            assert frame is not None
        return [order.number for order in frame.orders]

    first = driver(True)
    host = Host(first)
    host.say(hello(first, program=described(app)), HostReady())
    for number in range(50):
        assert next_orders(host) == [number]
        told = (Completion(order=number, result=ARRAYS.pack(1.0)),)
        host.say(Told(number=number + 1, completions=told))
    assert next_orders(host) == [50]
    host.close()
    first.close(within_s=0.0)
    entries = RunJournal(tmp_path).entries()
    assert isinstance(entries[0], RunStands)
    assert len(entries) <= 21
    second = driver(None)
    assert (second.core.run, second.core.version) == (first.core.run, 50)
    host = Host(second)
    host.say(hello(second, program=described(app)), HostReady(number=50, executors=((0, 1),)))
    assert next_orders(host) == [50]
    host.close()
    second.close(within_s=0.0)


class Speechless(Ssp):
    def save(self) -> Any:
        raise KeyError("told")


def test_a_driver_that_cannot_say_its_state_ends_the_run_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "JOURNAL_LINES", 2)
    app = Once()
    app.driver = Speechless(3)
    made = DriverServer(app, RunJournal(tmp_path), "j", 1, ignore, begins=True, placement=3)
    made.start()
    host = Host(made)
    host.say(hello(made, program=described(app)), HostReady())
    assert eventually(lambda: made.finish is not None)
    assert made.finish is not None
    assert "the driver Speechless(3, 0) raised KeyError: 'told'" in made.finish.reason
    host.close()
    made.close(within_s=0.0)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("secret", "another", None),
        ("secret", "\u00e9" * 8, None),
        ("job", "k", None),
        ("release", "0.0.1", "it has release 0.0.1"),
        ("program", "Other: 3 executors", "its program is [Other: 3 executors]"),
    ],
)
def test_a_stranger_is_not_welcomed(
    server: DriverServer, field: str, value: str, said: str | None
) -> None:
    host = Host(server)
    host.say(hello(server, **{field: value}))
    answer = host.hear()
    if said is None:
        assert answer is None
    else:
        assert isinstance(answer, Over)
        assert answer.refused
        assert said in answer.reason
    host.close()
    assert server.connected == 0


def test_no_bytes_end_the_driver(server: DriverServer) -> None:
    rng = random.Random(1)
    whole = b"".join(framed(hello(server)) + framed(HostReady()))
    for _ in range(200):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 8)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        host = Host(server)
        host.send(bytes(data[: rng.randint(1, len(data))]))
        host.close()
    for message in (HostReady(number=3), Told(number=5, completions=(
        Completion(order=99, result=b"\xc1"), Completion(order=0, result=b"\xc1")))):  # fmt: skip
        host = Host(server)
        host.say(hello(server), HostReady())
        assert isinstance(host.hear(), HostWelcome)
        host.say(message)
        host.close()
    assert eventually(lambda: server.connected == 0)
    assert server.error is None
    assert server._thread.is_alive()


def test_a_stranger_cannot_make_the_driver_wait_for_much(server: DriverServer) -> None:
    for size in (HEAD.pack(20_000, 0), HEAD.pack(100, 2**29)):
        host = Host(server)
        host.send(size)
        assert host.hear() is None
        host.close()


def test_what_a_task_raised_ends_the_run_with_its_reason(server: DriverServer) -> None:
    host = Host(server)
    host.say(hello(server), HostReady())
    host.say(TaskFailed(executor=0, reason="ZeroDivisionError: x"))
    while not isinstance(answer := host.hear(), Over):
        assert answer is not None
    assert answer.reason == "executor 0, on host 0: ZeroDivisionError: x"
    assert server.finish is not None
    assert server.finish.reason == answer.reason
    host.close()


def test_a_driver_goes_on_where_its_journal_ends(tmp_path: Path) -> None:
    first = begun(tmp_path)
    host = Host(first)
    host.say(hello(first), HostReady())
    run = host.hear()
    assert isinstance(run, HostWelcome)
    host.say(Told(number=1, completions=(Completion(order=0, result=b"\xc0"),)))
    journal = RunJournal(tmp_path)
    assert eventually(lambda: isinstance(journal.entries()[-1], BatchTold))
    host.close()
    first.close(within_s=0.0)
    second = begun(tmp_path, False)
    host = Host(second)
    host.say(hello(second))
    assert host.hear() == run, "the same run"
    host.say(HostReady())
    assert isinstance(host.hear(), TakeExecutor)
    orders = host.hear()
    assert isinstance(orders, Orders)
    assert [order.number for order in orders.orders] == [1]
    host.close()
    second.close(within_s=0.0)


def test_a_journal_that_cannot_be_written_ends_the_driver_before_it_acts(tmp_path: Path) -> None:
    """Its host is not told that the batch is noted: the next driver hears of it again."""
    first = begun(tmp_path)
    host = Host(first)
    host.say(hello(first), HostReady())
    while not isinstance(host.hear(), Orders):
        pass
    assert first._journal._file is not None
    os.close(first._journal._file)  # Like a disk that is gone.
    host.say(Told(number=1, completions=(Completion(order=0, result=b"\xc0"),)))
    assert host.hear() is None
    assert isinstance(first.error, Fatal)
    assert "make room there" in str(first.error)
    host.close()
    first._journal._file = None
    first.close(within_s=0.0)
    assert not any(isinstance(entry, BatchTold) for entry in RunJournal(tmp_path).entries())


def test_tables_that_have_begun_without_a_journal_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Rejected, match=r"its driver's journal is not in .*--checkpoint"):
        begun(tmp_path, False)


def test_tables_as_they_begin_make_an_older_journal_void(tmp_path: Path) -> None:
    journal = RunJournal(tmp_path)
    journal.write(RunBegun(run="old", program="P"))
    journal.close()
    server = begun(tmp_path)
    (entry,) = RunJournal(tmp_path).entries()
    assert isinstance(entry, RunBegun)
    assert entry.run != "old"
    server.close(within_s=0.0)


def test_many_orders_and_large_ones_reach_the_host_in_parts(tmp_path: Path) -> None:
    """A driver may dispatch all at once: hosts get what fits, and the rest as they complete."""

    class Much(Driver):
        def start(self, run: Run) -> None:
            for number in range(9000):
                run.dispatch(0, "x" * (60_000 if number < 30 else 1))

        def done(self, run: Run, executor: int, task: Any, result: Any) -> None:
            """Nothing follows."""

    app = Once()
    app.driver = Much()
    server = DriverServer(app, RunJournal(tmp_path), "j", 1, ignore, begins=True)
    server.start()
    host = Host(server)
    host.say(hello(server, program=described(app)), HostReady())
    got: list[int] = []
    while len(got) < SENT_MAX:
        message = host.hear()
        assert message is not None
        if isinstance(message, Orders):
            got += [order.number for order in message.orders]
    assert got == [*range(SENT_MAX)]
    done = tuple(Completion(order=number, result=b"\xc0") for number in range(4))
    host.say(Told(number=1, completions=done))
    while len(got) < SENT_MAX + 4:
        message = host.hear()
        assert message is not None
        if isinstance(message, Orders):
            got += [order.number for order in message.orders]
    assert got == [*range(SENT_MAX + 4)]
    host.close()
    server.close(within_s=0.0)


def test_a_run_that_began_with_a_checkpoint_goes_on_only_with_its_own_journal(
    tmp_path: Path,
) -> None:
    runs = []
    for placement in (3, 3, 4):
        server = begun(tmp_path, None, placement)
        runs.append(server.core.run)
        server.close(within_s=0.0)
    assert runs[0] == runs[1] != runs[2]


def saved(folder: Path, *entries: Entry, program: str = described(Once())) -> Path:
    """Files of a program that was saved after its executor's first task; more entries follow."""
    journal = RunJournal(folder)
    journal.write(RunBegun(run="r1", program=program))
    journal.write(ExecutorPlaced(executor=0, move=1, rank=0))
    done = Completion(order=0, result=ARRAYS.pack(None))
    journal.write(BatchTold(rank=0, number=1, completions=(done,)))
    for entry in entries:
        journal.write(entry)
    journal.close()
    (folder / "states").mkdir()
    (folder / "states" / "0-2").write_bytes(ARRAYS.pack({"some": 7}))
    return folder


GIVEN_BACK = ExecutorPlaced(executor=0, move=2, rank=None, state=2)


def test_a_saved_program_goes_on_with_its_state_and_its_orders(tmp_path: Path) -> None:
    """The journal is of the new run from then on: a driver that comes after a kill needs nothing
    else."""
    files = saved(tmp_path / "saved", GIVEN_BACK)
    first = begun(tmp_path / "own", saved=files)
    run = first.core.run
    first.close(within_s=0.0)
    assert run != "r1"
    second = begun(tmp_path / "own", begins=False)
    host = Host(second)
    host.say(hello(second))
    assert host.hear() == HostWelcome(run=run)
    host.say(HostReady())
    take = host.hear()
    assert isinstance(take, TakeExecutor)
    assert (take.executor, take.has_state) == (0, True)
    orders = host.hear()
    assert isinstance(orders, Orders)
    assert [ARRAYS.unpack(order.task) for order in orders.orders] == [1]
    host.close()
    second.close(within_s=0.0)


@pytest.mark.parametrize(
    ("entries", "about", "why"),
    [
        ((GIVEN_BACK,), "P", r"program-7 is of \[P\], this program is \[Once"),
        ((), described(Once()), "was saved while 1 of its executors were at hosts: pause it first"),
    ],
)
def test_what_cannot_go_on_is_refused_and_leaves_nothing(
    tmp_path: Path, entries: tuple[Entry, ...], about: str, why: str
) -> None:
    files = saved(tmp_path / "program-7", *entries, program=about)
    with pytest.raises(Rejected, match=why):
        begun(tmp_path / "own", saved=files)
    assert RunJournal(tmp_path / "own").entries() == []
