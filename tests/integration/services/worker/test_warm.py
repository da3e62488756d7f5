"""Ranks that are forked from the warm process are what a cold start makes of them."""

import asyncio
import fcntl
import json
import os
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import gone, soon

from slackwater.common.native import cgroup
from slackwater.services.worker import stacks
from slackwater.services.worker import warm as warm_module
from slackwater.services.worker.config import WorkerConfig
from slackwater.services.worker.containment import Containment
from slackwater.services.worker.environment import inherited
from slackwater.services.worker.processes import Intent, RankFiles
from slackwater.services.worker.warm import Warm

pytestmark = pytest.mark.live
WAYS = pytest.mark.parametrize("way", ["cold", "warm"])
LOG_BYTES_MAX = 8 * 1024**2


class NotForkedError(Exception):
    """It is to be started cold."""


class Bench:
    """Starts ranks the one way or the other, as the service does."""

    def __init__(self, folder: Path, warm: Warm, parent: Path | None) -> None:
        self.folder, self.warm = folder, warm
        self.containment = Containment(folder, parent)
        self.ranks = 0

    async def start(
        self,
        way: str,
        script: str,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        held: tuple[int, ...] = (),
    ) -> RankFiles:
        self.ranks += 1
        files = RankFiles(self.folder, "j", self.ranks)
        name = f"script{self.ranks}.py"
        work = self.folder / "work"
        work.mkdir(exist_ok=True)
        (work / name).write_text(script)
        intent = Intent(
            job="j", rank=self.ranks, workers=1, program=("python", name, *arguments),
            folder=str(work),
        )  # fmt: skip
        environment = {
            **inherited(os.environ),
            "PYTHONUNBUFFERED": "1",
            "SLACKWATER_RESULT": str(files.path("result.json")),
            **(env or {}),
            **self.containment.environment("j", self.ranks, 0),
        }
        files.intend(intent)
        printing = files.open_log(LOG_BYTES_MAX)
        try:
            if way == "cold":
                child = files.start(intent, environment, printing, held)
                asyncio.get_running_loop().run_in_executor(None, child.wait)
            else:
                if not await self.warm.fork(files, intent, environment, (printing, *held)):
                    raise NotForkedError
        finally:
            os.close(printing)
        await soon(files.identity, "its first process is known")
        return files

    async def run(self, way: str, script: str, *arguments: str, **more: Any) -> tuple[int, str]:
        """Return its exit code and all that it printed."""
        files = await self.start(way, script, *arguments, **more)
        await soon(lambda: files.code() is not None and files.logged(), "it ended")
        code = files.code()
        assert code is not None
        return code, files.log.read(0, 1 << 20).data.decode()


@asynccontextmanager
async def warmed(folder: Path, parent: Path | None, *imports: str) -> AsyncIterator[Bench]:
    config = WorkerConfig(warm="on", warm_imports=",".join(imports), state_dir=str(folder))
    warm = Warm(config, begins=True)
    keeping = asyncio.create_task(warm.keep())
    try:
        await soon(lambda: warm.ready or keeping.done(), "the warm process is ready", 120.0)
        yield Bench(folder, warm, parent)
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        assert not warm.ready


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with warmed(tmp_path, cgroup.own(), "numpy", "multiprocessing.pool") as made:
        yield made
        for rank in range(made.ranks + 1):
            assert made.containment.end("j", rank, 0)


LOOKS = r"""
import os, sys, signal, json, threading, locale, resource, tempfile, multiprocessing.process
def group():
    return sorted(line.split(":", 2)[0] + line.rpartition("/")[2].rpartition("-j-")[0]
                  for line in open("/proc/self/cgroup"))
def status(*names):
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return {name: lines[name].strip() for name in names}
signals = {}
for number in signal.valid_signals():
    try:
        signals[int(number)] = repr(signal.getsignal(number))
    except ValueError:
        pass
streams = [
    (s.name, s.encoding, s.errors, s.line_buffering, s.write_through, s.newlines, s.mode,
     type(s.buffer).__name__, s.isatty())
    for s in (sys.stdin, sys.stdout, sys.stderr)
]
print(json.dumps({
    "environment": {k: v for k, v in os.environ.items() if k not in ("_", "SHLVL")},
    "seen": sorted(
        entry for entry in open("/proc/self/environ").read().split("\0")
        if entry.startswith("SLACKWATER_PROCESS=")
    ),
    "folder": os.getcwd(), "argv": sys.argv, "orig_argv": sys.orig_argv[1:], "path": sys.path,
    "flags": repr(sys.flags), "executable": sys.executable, "prefix": sys.prefix,
    "names": sorted(globals()), "file": __file__, "name": __name__, "spec": repr(__spec__),
    "loader": type(__loader__).__name__, "package": repr(__package__), "doc": __doc__,
    "main": sys.modules["__main__"].__dict__ is globals(),
    "code": group.__code__.co_filename,
    "signals": signals, "status": status("SigBlk", "SigIgn", "SigCgt", "Threads", "Umask", "Uid"),
    "descriptors": {
        fd: os.readlink(f"/proc/self/fd/{fd}").split(":")[0]
        for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")
    },
    "streams": streams, "locale": locale.getlocale(),
    "session": [found == os.getsid(0) for found in (os.getpid(), os.getppid(), os.getpgrp())],
    "oom": open("/proc/self/oom_score_adj").read(), "nice": os.nice(0), "group": group(),
    "limits": [resource.getrlimit(n) for n in range(16)],
    "threads": [thread.name for thread in threading.enumerate()],
    "multiprocessing": multiprocessing.process.ORIGINAL_DIR, "recursion": sys.getrecursionlimit(),
    "hooks": sys.excepthook is sys.__excepthook__, "affinity": sorted(os.sched_getaffinity(0)),
    "tempdir": tempfile.gettempdir(),
}))
"""
DAEMON = (
    "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
)
PER_RANK = ("SLACKWATER_PROCESS", "SLACKWATER_RESULT")


async def test_a_program_cannot_tell_a_warm_start_from_a_cold_one(
    bench: Bench, tmp_path: Path
) -> None:
    """Environment, arguments, module, signals, descriptors, session, limits: all are the same."""
    env = {"GREETING": "hello", "TZ": "Asia/Tokyo", "PWD": "/nowhere", "TMPDIR": str(tmp_path)}
    told = []
    for way in ("cold", "warm"):
        opened = os.open(tmp_path / "gpu.lock", os.O_RDWR | os.O_CREAT)
        # Programs are told some of them by their numbers: high ones, and nobody else's.
        lock = fcntl.fcntl(opened, fcntl.F_DUPFD_CLOEXEC, 700)
        os.close(opened)
        try:
            code, text = await bench.run(way, LOOKS, "--lr", "0.1", env=env, held=(lock,))
        finally:
            os.close(lock)
        assert code == 0, text
        told.append(json.loads(text.replace(f"script{bench.ranks}.py", "script.py")))
        for name in PER_RANK:
            assert f"-{bench.ranks}-" in told[-1]["environment"].pop(name) or name != PER_RANK[0]
        (mark,) = told[-1].pop("seen")
        assert mark.endswith(f"-j-{bench.ranks}-0")
    cold, warm = told
    for what in cold:
        assert (what, warm[what]) == (what, cold[what])


@WAYS
@pytest.mark.parametrize(
    ("script", "code", "said"),
    [
        ("print('done')", 0, "done\n"),
        ("raise SystemExit(3)", 3, ""),
        ("import sys; sys.exit('no data')", 1, "no data\n"),
        ("import sys; sys.exit()", 0, ""),
        ("import os; os._exit(7)", 7, ""),
        ("import os; os.abort()", -signal.SIGABRT, None),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, "Killed\n"),
        ("import os; os.kill(os.getpid(), 15)", -signal.SIGTERM, "Terminated\n"),
        ("import os; os.kill(os.getpid(), 2)", -signal.SIGINT, None),
        ("import os, signal; signal.raise_signal(signal.SIGUSR1)", -signal.SIGUSR1, None),
        ("import no_such_module_at_all", 1, None),
        ("print('a'\n", 1, None),
        ("import atexit\natexit.register(print, 'closed')\nprint('ran')", 0, "ran\nclosed\n"),
        ("import atexit\natexit.register(print, 'closed')\nraise SystemExit(4)", 4, "closed\n"),
        (
            "import threading, time\n"
            "threading.Thread(target=lambda: (time.sleep(.1), print('thread'))).start()\n"
            "import atexit; atexit.register(print, 'then')",
            0,
            "thread\nthen\n",
        ),
        (
            "class Holder:\n    def __del__(self): print('dropped')\nheld = Holder()",
            0,
            "dropped\n",
        ),
        ("import sys; sys.excepthook = lambda *e: print('hook', e[0].__name__)\n1 / 0", 1,
         "hook ZeroDivisionError\n"),
    ],
)  # fmt: skip
async def test_exit_codes_and_last_words_are_those_of_a_cold_start(
    bench: Bench, way: str, script: str, code: int, said: str | None
) -> None:
    found, text = await bench.run(way, script)
    assert found == code, text
    if said is not None:
        assert text == said


async def test_a_failure_is_told_in_the_same_words(bench: Bench) -> None:
    script = "def inner():\n    raise ValueError('no such model')\n\ninner()\n"
    (_, cold), (_, warm) = [await bench.run(way, script) for way in ("cold", "warm")]
    assert warm.replace("script2", "script1") == cold
    assert cold.endswith("ValueError: no such model\n")


@WAYS
@pytest.mark.parametrize("daemon", ["", DAEMON], ids=["alone", "thread"])
async def test_what_was_written_is_in_its_file_though_nobody_closed_it(
    bench: Bench, way: str, daemon: str, tmp_path: Path
) -> None:
    path = tmp_path / f"{way}.csv"
    script = f"{daemon}file = open({str(path)!r}, 'w')\nfile.write('loss,1')\n"
    assert (await bench.run(way, script))[0] == 0
    assert path.read_text() == "loss,1"


@WAYS
async def test_children_that_left_their_session_end_with_a_forked_rank(
    tmp_path: Path, way: str
) -> None:
    """By the mark alone, as where there are no cgroups; and what it forked itself, too."""
    script = (
        "import os, subprocess, time\n"
        "subprocess.Popen(['setsid', 'sleep', '300'])\n"
        "if not os.fork():\n    os.setsid()\n"
        "open(f'up{os.getpid()}', 'w').close()\ntime.sleep(300)\n"
    )
    async with warmed(tmp_path, None, "json") as bench:
        files = await bench.start(way, script)
        await soon(lambda: len(list((tmp_path / "work").glob("up*"))) == 2, "both run")
        pids = [int(path.name[2:]) for path in (tmp_path / "work").glob("up*")]
        assert set(pids) <= bench.containment.processes()
        identity = files.identity()
        assert identity is not None
        files.signal_group(identity, kill=True)
        assert await asyncio.to_thread(bench.containment.end, "j", bench.ranks, 0)
        await soon(lambda: all(gone(pid) for pid in pids), "none is left")
        assert files.code() is None  # Its leader was killed, too.


@WAYS
async def test_a_rank_that_ignores_sigterm_is_not_ended_by_it(bench: Bench, way: str) -> None:
    script = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.stdout.write('asked\\n'))\n"
        "sys.stdout.write('up\\n')\n"
        "time.sleep(.3)\nprint('saved')\nraise SystemExit(5)\n"
    )
    files = await bench.start(way, script)
    await soon(lambda: files.log.last_line() == "up", "it runs")
    identity = files.identity()
    assert identity is not None
    files.signal_group(identity, kill=False)
    await soon(lambda: files.code() is not None and files.logged(), "it ended")
    assert files.code() == 5
    assert files.log.read(0, 100).data == b"up\nasked\nsaved\n"


@WAYS
async def test_an_attempt_is_started_once_whichever_way(bench: Bench, way: str) -> None:
    """A fork that came late finds the file that another start has made, and runs nothing."""
    files = await bench.start("cold", "import time\nprint('once')\ntime.sleep(300)")
    await soon(lambda: files.log.last_line() == "once", "it runs")
    before = files.identity()
    bench.ranks -= 1
    again = await bench.start(way, "print('twice')")
    assert again.identity() == before
    await asyncio.sleep(0.2)  # There is nothing to wait for: nothing must happen.
    assert b"twice" not in again.log.read(0, 1000).data
    assert bench.containment.end("j", 1, 0)


async def test_a_forked_rank_holds_the_locks_of_its_gpus(bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "gpu.lock"
    lock = os.open(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    files = await bench.start("warm", "import time; time.sleep(300)", held=(lock,))
    os.close(lock)
    other = os.open(path, os.O_RDWR)
    with pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    identity = files.identity()
    assert identity is not None
    files.signal_group(identity, kill=True)

    def free() -> bool:
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    await soon(free, "its locks are free")
    os.close(other)


async def test_forks_do_not_share_random_numbers(bench: Bench) -> None:
    script = "import random, numpy, uuid; print(random.random(), numpy.random.rand(), uuid.uuid4())"
    drawn = [(await bench.run("warm", script))[1].split() for _ in range(2)]
    assert not set(drawn[0]) & set(drawn[1])


async def test_ranks_outlive_the_warm_process_and_another_one_is_made(
    bench: Bench,
) -> None:
    """After a back-off, which the kill of a process that lived for a moment makes two seconds."""
    script = "import sys, time\nfor _ in range(3000):\n    time.sleep(.1)\n"
    files = await bench.start("warm", script)
    process = bench.warm._process
    assert process is not None
    process.kill()
    await soon(lambda: not bench.warm.ready, "its end is noticed")
    identity = files.identity()
    assert identity is not None
    assert identity.alive()
    await soon(lambda: bench.warm.ready, "there is another one")
    assert (await bench.run("warm", "print('again')")) == (0, "again\n")


async def test_a_warm_process_that_does_not_answer_is_replaced_and_the_rank_starts_cold(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm_module, "FORK_S", 0.2)
    process = bench.warm._process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(NotForkedError):
        await bench.run("warm", "print('one')")
    assert not bench.warm.ready
    await soon(lambda: gone(process.pid), "it was killed")


async def test_a_request_that_is_too_large_starts_cold_and_leaves_the_warm_process_alone(
    bench: Bench,
) -> None:
    """Red before: it took what fitted of the request, and ended. Each such job cost the others what
    importing torch takes, and more each time."""
    process = bench.warm._process
    large = {f"LONG_{n}": "x" * 4096 for n in range(36)}  # 144 KiB: sockets take up to 208.
    with pytest.raises(NotForkedError):
        await bench.start("warm", "pass", env=large)
    assert (await bench.run("warm", "print(1 + 1)")) == (0, "2\n")
    assert bench.warm._process is process


async def test_what_lies_beside_a_program_in_place_of_an_import_makes_it_start_cold(
    bench: Bench,
) -> None:
    work = bench.folder / "work"
    (work / "numpy").mkdir(parents=True)
    with pytest.raises(NotForkedError):
        await bench.run("warm", "print('one')")
    (work / "numpy").rmdir()
    assert (await bench.run("warm", "print('one')")) == (0, "one\n")


async def test_a_module_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    config = WorkerConfig(warm="on", warm_imports="no_such_module", state_dir=str(tmp_path))
    said = await Warm(config, begins=True)._life()
    assert said == "ModuleNotFoundError: No module named 'no_such_module'"


async def test_an_import_that_begins_a_thread_forbids_forks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "begins_a_thread.py").write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    config = WorkerConfig(warm="on", warm_imports="begins_a_thread", state_dir=str(tmp_path))
    said = await Warm(config, begins=True)._life()
    assert said == "an import began 1 threads, which its forks would lack"


async def test_torch_begins_in_a_fork_as_in_a_fresh_process(tmp_path: Path) -> None:
    """Torch is imported once by the warm process and once by a cold one: 9 s."""
    pytest.importorskip("torch")
    script = (
        "import sys; warm = 'torch' in sys.modules\n"
        "import torch\nprint(torch.rand(1).item())\nprint(torch.get_num_threads())\n"
        "x = torch.randn(400, 400)\n"
        "m = torch.nn.Linear(400, 400); m(x).sum().backward(); print(m.weight.grad.shape)\n"
        "print(warm)\n"
    )
    async with warmed(tmp_path, None, "torch", "torch._dynamo", "slackwater.torch") as bench:
        runs = [await bench.run(way, script) for way in ("cold", "warm", "warm")]
    told = [text.splitlines() for _, text in runs]
    assert [code for code, _ in runs] == [0, 0, 0], told
    assert [lines[-1] for lines in told] == ["False", "True", "True"]
    assert len({lines[0] for lines in told}) == 3  # Each has random numbers of its own.
    assert told[0][1:-1] == told[1][1:-1] == told[2][1:-1]


async def test_what_the_interpreter_reads_from_the_environment_makes_a_program_start_cold(
    bench: Bench,
) -> None:
    with pytest.raises(NotForkedError):
        await bench.run("warm", "print(1)", env={"PYTHONHASHSEED": "1"})


@pytest.mark.parametrize("way", ["warm", "cold"])
async def test_a_program_tells_where_it_stands(bench: Bench, way: str, tmp_path: Path) -> None:
    """A forked one registers for it anew: its warm process had no file to write to."""
    script = (
        "import time\ndef there():\n    print('there', flush=True)\n    time.sleep(600)\nthere()\n"
    )
    path = tmp_path / "stacks"
    files = await bench.start(way, script, env=stacks.environment(path, inherited(os.environ)))
    await soon(lambda: b"there" in files.log.read(0, 100).data, "it stands there")
    pids = bench.containment.processes_of("j", bench.ranks, 0)
    look = await asyncio.to_thread(stacks.look, pids, path)
    assert f"script{bench.ranks}.py" in look.stack, look
    assert "line 4 in there" in look.stack
    assert files.code() is None
