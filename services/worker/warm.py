"""Keeps the warm process of this service, and asks it to fork ranks (see warm_program.py).

A rank of it runs within a tenth of a second, since the imports of a training program, seconds each,
are behind it. All else is as of a cold start: the files, the session, the cgroup, the environment.
It is asked only for `python train.py ...`; whatever it cannot do, does not answer within FORK_S or
refuses, is started cold. That both start the same attempt does no harm: whoever makes the file
`process` first runs it.
"""

import asyncio
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Final

import structlog

from slackwater.common.base import limits
from slackwater.services.worker.config import WorkerConfig
from slackwater.services.worker.containment import CGROUP, MARK
from slackwater.services.worker.environment import inherited
from slackwater.services.worker.gone import gone
from slackwater.services.worker.processes import Intent, RankFiles
from slackwater.services.worker.warm_program import DESCRIPTORS_MAX, REQUEST_BYTES_MAX

_log = structlog.get_logger()
FORK_S: Final = 5.0
"""A fork takes 20 ms, and over a second where every core is taken twice; a cold start, for which it
is given up, costs such a machine more than the wait."""
READY_S: Final = 300.0
"""Importing torch takes 3 to 20 s; from a cold network file system minutes."""
_AGAIN_S_MIN: Final = 1.0
_AGAIN_S_MAX: Final = 300.0
_MARK_CHARS: Final = 200
"""Room for the mark of any rank."""
_SAID_BYTES: Final = 64 * 1024
_AT_IMPORT: Final = (
    "ATEN_", "CUBLAS_", "CUDA_", "DNNL_", "GLIBC_", "GOMP_", "GOTO_", "HIP_", "HSA_", "KMP_",
    "LANG", "LC_", "LD_", "MALLOC_", "MKL_", "NUMBA_", "NUMEXPR_", "NVIDIA_", "OMP_", "ONEDNN_",
    "OPENBLAS_", "PYTHON", "PYTORCH_", "ROCR_", "TORCHDYNAMO_", "TORCHINDUCTOR_", "TORCH_",
    "TRITON_", "VECLIB_", "VIRTUAL_ENV", "XLA_",
)  # fmt: skip
"""Begin the names of variables that interpreters and libraries read when they are loaded, or by
which they are chosen."""
_LATER: Final = frozenset({"CUDA_VISIBLE_DEVICES"})
"""Read when CUDA is first used, which is after the fork."""


def read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the part of the environment that counts before a program's first line."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_AT_IMPORT) and name not in _LATER
    }


def why_cold(program: Sequence[str], asked: Mapping[str, str], given: Mapping[str, str]) -> str:
    """Say why the program cannot be a fork of a process with the environment `given` when `asked`
    is its own; empty: it can."""
    if program[0] not in ("python", sys.executable):
        return f"{program[0]} is not the service's interpreter"
    if len(program) < 2 or program[1].startswith("-") or not program[1].endswith(".py"):
        return "only `python SCRIPT.py ...` is forked"
    ours, theirs = read_at_import(asked), read_at_import(given)
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            return f"{name} is another one, and is read before the program begins"
    folders = asked.get("PYTHONPATH", "")
    if folders and not all(os.path.isabs(folder) for folder in folders.split(os.pathsep)):
        return "PYTHONPATH names a folder that depends on where the program runs"
    return ""


def at_once(config: WorkerConfig, watched: bool) -> bool:
    """Tell whether the warm process is made before a rank wants it: it costs seconds of a core.
    `watched`: there are real GPUs."""
    return config.warm == "on" or (config.warm == "auto" and watched)


def imports(config: WorkerConfig) -> str:
    """Name what the warm process imports: what is configured, or what is installed of it."""
    if config.warm_imports:
        return config.warm_imports
    if importlib.util.find_spec("torch") is None:
        return "numpy,slackwater.agent"
    return "torch,torch._dynamo,slackwater.torch"


class Warm:
    """The warm process of one service. `begins`: it is made at once; otherwise when the first rank
    that it could have forked is started."""

    def __init__(self, config: WorkerConfig, begins: bool) -> None:
        self._imports = imports(config)
        self._environment = {
            **inherited(os.environ, config.environment),
            "PYTHONUNBUFFERED": "1",
            MARK: "." * _MARK_CHARS,
        }
        self._needed = asyncio.Event()
        if begins:
            self._needed.set()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        """Is set while it can be asked."""
        self._one = asyncio.Lock()

    @property
    def ready(self) -> bool:
        return self._control is not None

    async def keep(self) -> None:
        """Keep a warm process, as long as the service lasts."""
        await self._needed.wait()
        again_s = _AGAIN_S_MIN
        while True:
            begun_s = time.monotonic()
            reason = await self._life()
            lived_s = time.monotonic() - begun_s
            again_s = _AGAIN_S_MIN if lived_s > _AGAIN_S_MAX else min(2 * again_s, _AGAIN_S_MAX)
            _log.warning("warm.ended", reason=reason, lived_s=round(lived_s, 1), again_s=again_s)
            await asyncio.sleep(again_s)

    async def _life(self) -> str:
        """Run one process until it ends, and return its last words."""
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        said = -1
        try:
            with its:
                self._process, said = self._begun(its)
            begun_s = time.monotonic()
            if await _received(ours, READY_S):
                _log.info("warm.ready", seconds=round(time.monotonic() - begun_s, 1))
                self._control = ours
                await gone(self._process.pid)
            return _last_words(said)
        except OSError as error:
            return str(error)
        finally:
            self._control = None
            if self._process is not None:
                self._process.kill()
                self._process.wait()
                self._process = None
            ours.close()
            if said >= 0:
                os.close(said)

    def _begun(self, its: socket.socket) -> tuple[subprocess.Popen[bytes], int]:
        """Start the process with its end of the socket; return it, and what it says. It prints into
        a pipe, as ranks do. Raises OSError."""
        module = "slackwater.services.worker.warm_program"
        said, saying = os.pipe()
        os.set_blocking(said, False)
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", module, str(its.fileno()), self._imports],
                cwd="/",
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=saying,
                stderr=saying,
                start_new_session=True,
                pass_fds=[its.fileno()],
            )
        except OSError:
            os.close(said)
            raise
        finally:
            os.close(saying)
        return process, said

    async def fork(
        self,
        files: RankFiles,
        intent: Intent,
        environment: Mapping[str, str],
        descriptors: Sequence[int],
    ) -> bool:
        """Start the rank, whose intention is on disk. `descriptors`: what it prints to, then what
        it is to hold, by the same numbers. False: start it cold."""
        reason = why_cold(intent.program, environment, self._environment)
        if reason:
            _log.debug("warm.cold", job=intent.job, rank=intent.rank, reason=reason)
            return False
        self._needed.set()
        request = _request(files, intent, environment, descriptors[1:])
        async with self._one:
            answer = await self._asked(request, descriptors)
        if "leader" not in answer:
            _log.info("warm.cold", job=intent.job, rank=intent.rank, **answer)
        return "leader" in answer

    async def _asked(self, request: bytes, descriptors: Sequence[int]) -> dict[str, str]:
        if len(request) > REQUEST_BYTES_MAX or len(descriptors) > DESCRIPTORS_MAX:
            return {"cold": f"{len(request)} bytes and {len(descriptors)} files are too many"}
        control, process = self._control, self._process
        if control is None or process is None:
            return {"cold": "the warm process is not there yet"}
        try:
            socket.send_fds(control, [request], descriptors)
            payload = await _received(control, FORK_S)
        except OSError as error:
            return {"cold": str(error)}
        if not payload:
            if self._control is control:
                self._control = None
                process.send_signal(signal.SIGKILL)  # An answer that comes later is nobody's.
            return {"cold": f"the warm process did not answer within {FORK_S} s"}
        answer: dict[str, str] = json.loads(payload)
        return answer


def _request(
    files: RankFiles, intent: Intent, environment: Mapping[str, str], held: Sequence[int]
) -> bytes:
    seen = {name: value for name, value in environment.items() if name != CGROUP}
    request = {
        "prefix": files.prefix,
        "argv": intent.program[1:],
        "numbers": list(held),
        "folder": intent.folder or os.getcwd(),
        "environment": seen,
        "cgroup": environment.get(CGROUP, ""),
        "mark": f"{MARK}={environment[MARK]}",
        "oom_score": limits.OOM_SCORE_JOB,
        "account": [intent.account, intent.account, []] if intent.account else None,
    }
    return json.dumps(request).encode()


async def _received(control: socket.socket, within_s: float) -> bytes:
    """Return the next message; empty: none came in time, or the other end is gone."""
    loop, came = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(control, came.set)
    try:
        await asyncio.wait_for(came.wait(), within_s)
        return control.recv(1 << 16)
    except (TimeoutError, ConnectionError):
        return b""
    finally:
        loop.remove_reader(control)


def _last_words(said: int) -> str:
    try:
        words = os.read(said, _SAID_BYTES).decode(errors="replace").strip()
    except BlockingIOError:
        words = ""
    return words.rpartition("\n")[2] or "it said nothing"
