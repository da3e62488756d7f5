"""Jobs under accounts of their own: each reaches what is its, and nothing of another or of the
service."""

import asyncio
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slackwater.common.base.accounts import account_ids
from slackwater.common.base.clock import LiveClock
from slackwater.common.base.errors import ConfigRejected
from slackwater.common.bus.memory import MemoryBroker
from slackwater.common.bus.relay import RelayBus, Ticket, read_ticket
from slackwater.schemas.base import JobId, NodeId
from slackwater.services.worker.accounts import Accounts, give
from slackwater.services.worker.config import WorkerConfig
from slackwater.services.worker.effects import FindProcesses, RunRank, SignalRank
from slackwater.services.worker.events import Found, ProcessExited
from slackwater.services.worker.gpus import Inventory
from slackwater.services.worker.processes import Intent, RankFiles
from slackwater.services.worker.shell import Processes

IDS = "60100-60103"
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give accounts")


class Told:
    """Stands for the shell: keeps what is posted and counted."""

    @staticmethod
    def now_s() -> float:
        return LiveClock().now_s()

    def __init__(self) -> None:
        self.events: asyncio.Queue[Any] = asyncio.Queue()

    def post(self, event: Any) -> None:
        self.events.put_nowait(event)

    def count(self, name: str, by: int = 1) -> None:
        """The metrics are another test's."""

    def fail(self, error: BaseException) -> None:
        self.events.put_nowait(error)

    async def ended(self) -> ProcessExited:
        async with asyncio.timeout(60):
            event = await self.events.get()
        assert isinstance(event, ProcessExited), event
        return event


@pytest.fixture
def state_dir() -> Iterator[Path]:
    """A folder that other accounts can pass through, which those of pytest are not."""
    folder = Path(tempfile.mkdtemp(prefix="slackwater-accounts-"))
    folder.chmod(0o711)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
async def service(state_dir: Path) -> Any:
    config, told = WorkerConfig(state_dir=str(state_dir), gpus=0, accounts=IDS), Told()
    inventory = Inventory(config, NodeId("n1"), None)
    processes = Processes(config, inventory, MemoryBroker(seed=1).connect("w1"))
    await processes.start(told)  # type: ignore[arg-type]  # what of a port is used
    processes.find(FindProcesses())
    yield processes, told
    for job, rank in list(processes._watched):  # A test that fails leaves its programs.
        processes.signal(SignalRank(JobId(job), rank, kill=True))
    await processes.stop()


def sh(job: str, script: str, rank: int = 0, **env: str) -> RunRank:
    return RunRank(JobId(job), rank, 0, 1, ("/bin/sh", "-c", script), "/", (), env=env)


async def run(service: Any, job: str, script: str, attempt: int = 0, **env: str) -> ProcessExited:
    processes, told = service
    processes.run(replace(sh(job, script, **env), attempt=attempt))
    ended: ProcessExited = await told.ended()
    return ended


async def test_a_program_has_an_account_a_home_and_a_result_of_its_own(
    service: Any, state_dir: Path
) -> None:
    said = """
    [ "$(id -G)" = "$(id -u)" ] || exit 3
    grep -q 'NoNewPrivs:.1' /proc/self/status || exit 4
    grep -q 'CapEff:.0*$' /proc/self/status || exit 5
    touch "$HOME/mine" || exit 6
    [ "$SLACKWATER_RESULT" = "$HOME/result.json" ] || exit 7
    printf '{"uid": %s}' "$(id -u)" > "$SLACKWATER_RESULT.new" && mv "$SLACKWATER_RESULT.new" "$SLACKWATER_RESULT"
    """  # noqa: E501
    ended = await run(service, "j", said)
    assert ended.code == 0, RankFiles(state_dir, "j", 0).log.last_line()
    (uid,) = (int(text) for text in [ended.result.removeprefix('{"uid": ').removesuffix("}")])
    assert uid in account_ids(IDS)
    own = RankFiles(state_dir, "j", 0).path("own").stat()
    assert (own.st_uid, stat.S_IMODE(own.st_mode)) == (uid, 0o700)


async def test_no_two_jobs_have_an_account_at_a_time(service: Any, state_dir: Path) -> None:
    processes, told = service
    for number in range(5):
        processes.run(
            sh(f"j{number}", "read line < /dev/zero; sleep 60" if number < 4 else "id -u")
        )
    refused = await told.ended()
    assert (refused.job, refused.code) == ("j4", 127)
    assert "all 4 accounts are in use" in refused.result
    accounts = Accounts(IDS)
    files = [RankFiles(state_dir, "j1", rank) for rank in range(2)]
    assert len({accounts.take(f"j{number}", 0) for number in range(4)}) == 4
    assert accounts.take("j1", 1) == accounts.take("j1", 0)
    taken = accounts.take("j1", 0)
    accounts.free(files[0])
    with pytest.raises(OSError, match="in use"):
        accounts.take("other", 0)  # Its rank 1 still runs.
    accounts.free(files[1])
    assert accounts.take("other", 0) == taken
    for number in range(4):
        processes.signal(_kill(f"j{number}"))
        assert (await told.ended()).code != 0


def _kill(job: str) -> SignalRank:
    return SignalRank(JobId(job), 0, kill=True)


TRIES = """
tried=0 open=0
try() {
  tried=$((tried + 1))
  if "$@" > /dev/null 2>&1; then open=$((open + 1)); echo "open: $*"; fi
}
for folder in $VICTIM $VICTIM/*; do
  try ls "$folder"; try cat "$folder"; try cp /bin/true "$folder"; try rm "$folder"/*
  try chmod 777 "$folder"; try ln "$folder" "$HOME/link"
done
for name in intent.json log token process.new exit own/result.json own/secret reported; do
  try cat "$VICTIM/rank0.$name"; try sh -c "echo x >> $VICTIM/rank0.$name"
done
for pid in $PID $SERVICE; do
  for file in environ mem maps fd/0 cwd/x root/x; do try cat /proc/$pid/$file; done
  try ls /proc/$pid/fd; try kill -0 $pid; try kill -9 $pid
done
try ls "$STATE"; try ls "$STATE/jobs"; try cat "$STATE/worker.toml"; try touch "$STATE/x"
try setpriv --reuid 0 id; try setpriv --reuid "$OTHER" id
echo "$tried $open"
[ "$open" = 0 ] && [ "$tried" -gt 50 ]
"""


async def test_a_job_reaches_nothing_of_another_job_or_of_the_service(
    service: Any, state_dir: Path
) -> None:
    processes, told = service
    (state_dir / "worker.toml").write_text("token")
    (state_dir / "worker.toml").chmod(0o600)
    processes.run(sh("victim", 'echo s3cret > "$HOME/secret"; echo $$ > "$HOME/pid"; sleep 300'))
    files = RankFiles(state_dir, "victim", 0)
    pid = files.path("own") / "pid"
    async with asyncio.timeout(60):
        while not pid.exists() or not pid.read_text():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    other = files.path("own").stat().st_uid
    ended = await run(
        service, "thief", TRIES, VICTIM=str(files.folder), PID=pid.read_text().strip(),
        SERVICE=str(os.getpid()), STATE=str(state_dir), OTHER=str(other),
    )  # fmt: skip
    assert ended.code == 0, RankFiles(state_dir, "thief", 0).path("log").read_text()
    assert (files.path("own") / "secret").read_text() == "s3cret\n"
    processes.signal(_kill("victim"))
    await told.ended()


LIE = """#!/bin/sh
/usr/bin/id -u >> "{seen}"
exec /usr/bin/{name} "$@"
"""


async def test_what_a_user_gives_never_runs_as_the_service(service: Any, state_dir: Path) -> None:
    """A search path of the user's own had root run the user's `cat` and `setpriv`."""
    theirs, seen = state_dir / "bin", state_dir / "seen"
    theirs.mkdir()
    theirs.chmod(0o755)
    seen.touch()
    seen.chmod(0o666)
    for name in ("cat", "mv", "setpriv", "sh", "id"):
        (theirs / name).write_text(LIE.format(seen=seen, name=name))
        (theirs / name).chmod(0o755)
    ended = await run(
        service, "j", 'cat /dev/null && [ "$SAID" = "a \'b\'" ]',
        PATH=f"{theirs}:/usr/bin:/bin", SAID="a 'b'",
        SLACKWATER_CGROUP=str(theirs), ENV=str(theirs / "id"),
    )  # fmt: skip
    assert ended.code == 0, RankFiles(state_dir, "j", 0).path("log").read_text()
    assert {int(line) for line in seen.read_text().split()} <= set(account_ids(IDS))
    assert seen.read_text(), "its own cat was run"
    assert not (theirs / "cgroup.procs").exists()


async def test_a_program_runs_in_no_folder_that_is_closed_to_it(
    service: Any, state_dir: Path
) -> None:
    """A working folder opens what is in it, whatever folders around it are closed."""
    processes, told = service
    inner = state_dir / "closed" / "inner"
    inner.mkdir(parents=True)
    (state_dir / "closed").chmod(0o700)
    (inner / "secret").write_text("s3cret")
    inner.chmod(0o755)
    processes.run(replace(sh("j", "cat secret"), folder=str(inner)))
    ended = await told.ended()
    assert ended.code == 127
    assert str(inner) in ended.result
    assert "s3cret" not in RankFiles(state_dir, "j", 0).path("log").read_text()


async def test_a_program_may_open_what_it_prints_to(service: Any, state_dir: Path) -> None:
    ended = await run(service, "j", "echo one > /dev/stdout && echo two > /dev/stderr")
    assert ended.code == 0
    assert RankFiles(state_dir, "j", 0).path("log").read_text() == "one\ntwo\n"


async def test_a_later_job_with_the_same_account_finds_nothing_of_a_former_one(
    service: Any, state_dir: Path
) -> None:
    """Their files are kept for weeks, the accounts are given again at once."""
    uids = {}
    for number in range(3 * len(account_ids(IDS))):
        job = f"j{number}"
        ended = await run(service, job, 'echo s3cret > "$HOME/secret"; id -u > $SLACKWATER_RESULT')
        uid, files = int(ended.result), RankFiles(state_dir, job, 0)
        if former := uids.get(uid):
            secret = RankFiles(state_dir, former, 0).path("own") / "secret"
            tried = await run(service, job, f"cat {secret} || ls {secret.parents[2]}", attempt=1)
            assert tried.code != 0, tried
            return
        uids[uid] = job
        assert stat.S_IMODE(files.folder.stat().st_mode) == 0o700
    raise AssertionError("no account was given twice")


async def test_a_service_that_starts_again_gives_nobody_the_account_of_a_job_that_runs(
    service: Any, state_dir: Path
) -> None:
    """Ranks that were intended when it was killed are started again before others are watched."""
    taken = Accounts(IDS)
    first = taken.take("a", 0)
    other = next(f"b{n}" for n in range(100) if Accounts(IDS).take(f"b{n}", 0) == first)
    RankFiles(state_dir, "a", 0).intend(
        Intent(job="a", rank=0, workers=1, program=("true",), account=first)
    )
    again = Accounts(IDS)
    again.adopt(state_dir, [Found(JobId("a"), 0, "running")])
    assert again.take(other, 0) != first
    assert stat.S_IMODE((state_dir / "jobs").stat().st_mode) == 0o711


def test_a_job_s_copy_of_its_code_is_its_own_and_nobody_else_s(state_dir: Path) -> None:
    """Its program may have linked files of others into it: those stay what they are."""
    copy, others = state_dir / "code", state_dir / "others"
    (copy / "below").mkdir(parents=True)
    (copy / "below" / "train.py").touch()
    (copy / "link").symlink_to(others)
    others.touch()
    give(copy, 60100)
    os.link(others, copy / "below" / "linked")
    give(copy, 60101)
    uids = {path.name: path.lstat().st_uid for path in (copy, *copy.rglob("*"))}
    assert uids == {"code": 60101, "below": 60101, "train.py": 60101, "link": 60101, "linked": 0}
    assert others.stat().st_uid == 0


async def test_a_result_that_leads_elsewhere_is_not_read(service: Any, state_dir: Path) -> None:
    """A program could have the service, which is root, read a file to it."""
    (state_dir / "secret").write_text('"s3cret"')
    for script in (f"ln -s {state_dir}/secret $SLACKWATER_RESULT", "mkfifo $SLACKWATER_RESULT"):
        ended = await run(service, f"j{len(script)}", script)
        assert ended.code == 0
        assert "the result cannot be read" in ended.result
        assert "s3cret" not in ended.result


async def test_the_relay_knows_the_account(service: Any, state_dir: Path) -> None:
    """The token in the hands of root itself, or of another account, opens nothing."""
    processes, told = service
    processes.run(sh("j", "echo $$ > $HOME/pid; sleep 300"))
    pid = RankFiles(state_dir, "j", 0).path("own") / "pid"
    async with asyncio.timeout(60):
        while not pid.exists() or not pid.read_text():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    folder = f"/proc/{pid.read_text().strip()}/fd"
    found = [read_ticket(f"{folder}/{each}") for each in os.listdir(folder)]
    (ticket,) = (each for each in found if each is not None)
    assert isinstance(ticket, Ticket)
    with pytest.raises(Exception, match="of account 0 is not process 0 of job j"):
        await RelayBus.connect(ticket)
    processes.signal(_kill("j"))
    await told.ended()


def test_accounts_that_cannot_be_given_are_refused_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigRejected, match="cannot pass through"):
        Accounts(IDS).check(tmp_path)
    for wrong in ("0-10", "70000-60000"):
        with pytest.raises(ConfigRejected, match="FIRST-LAST"):
            Accounts(wrong)
    Accounts("").check(tmp_path)
