"""Look, before a rank is launched, whether it can start, and make the environment that it gets.

A rank inherits a named part of the service's environment and nothing else: what the service was
given for itself (credentials, addresses, a service manager's sockets) is none of a job's business.
"""

import os
import shutil
import socket
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from slackwater.common.base import limits, tracing
from slackwater.common.bus.access import VARIABLES
from slackwater.schemas.base import RUN_ATTEMPTS, NodeId
from slackwater.schemas.gpus import described, held
from slackwater.services.worker.code import script_digest
from slackwater.services.worker.config import WorkerConfig
from slackwater.services.worker.effects import RunRank
from slackwater.services.worker.stacks import python_path

INHERITED: Final = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "LC_*", "TZ", "TMPDIR",
    "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "XDG_CACHE_HOME", "SSL_CERT_FILE",
    "SSL_CERT_DIR", "CUDA_*", "NVIDIA_*", "NCCL_*", "GLOO_*", "OMP_*", "MKL_*", "OPENBLAS_*",
    "NUMBA_CACHE_DIR", "SLACKWATER_TRANSPORT",
)  # fmt: skip
"""Variables of the service's environment that its ranks get, too."""


def inherited(environment: Mapping[str, str], more: Sequence[str] = ()) -> dict[str, str]:
    """Pick what a rank may have of the service's `environment`: INHERITED and the names in `more`,
    which may end in `*`. Never the credentials of the bus: a job gets its own by --env. Its
    Pythons write their stacks when asked (stacks.py)."""
    names = (*INHERITED, *more)
    found = {
        name: value
        for name, value in environment.items()
        if name not in VARIABLES.values() and any(fnmatchcase(name, each) for each in names)
    }
    return found | python_path(found)


def rank_environment(
    effect: RunRank, config: WorkerConfig, node: NodeId, result: Path, venv: str = ""
) -> dict[str, str]:
    """Make the environment of a rank; `result`: the file that it may write, `venv`: the folder of
    its virtual environment."""
    return {
        **_trace(),
        **in_venv({**inherited(os.environ, config.environment), **effect.env}, effect.env, venv),
        "SLACKWATER_JOB": effect.job,
        "SLACKWATER_RANK": str(effect.rank),
        "SLACKWATER_WORKERS": str(effect.workers),
        "SLACKWATER_RESULT": str(result.absolute()),
        "SLACKWATER_ADDRESS": config.address or socket.gethostname(),
        **visible_gpus(effect.gpu_ids),
        **told_of_gpus(effect),
        **gang_environment(effect, node),
        "PYTHONUNBUFFERED": "1",  # The last line of a log is the reason of a failure.
    }


def _trace() -> dict[str, str]:
    """Hand on the trace that the launch is part of: a program that traces goes on with it."""
    found = tracing.current()
    return {tracing.VARIABLE: found} if found else {}


def in_venv(environment: Mapping[str, str], asked: Mapping[str, str], venv: str) -> dict[str, str]:
    """Let programs be found in the virtual environment first, and modules nowhere else but where
    the job `asked` for. Without one the environment stays as it is."""
    if not venv:
        return dict(environment)
    others = {name: value for name, value in environment.items() if name != "PYTHONPATH"}
    own = {"PYTHONPATH": asked["PYTHONPATH"]} if "PYTHONPATH" in asked else {}
    path = in_front(venv, environment.get("PATH"))
    return {**others, **python_path(own), "VIRTUAL_ENV": venv, "PATH": path}


def in_front(venv: str, path: str | None) -> str:
    """Return where programs are looked for: in the virtual environment, if any, then in `path`."""
    return os.pathsep.join([f"{venv}/bin"] * bool(venv) + [path or os.defpath])


def visible_gpus(gpu_ids: tuple[str, ...]) -> dict[str, str]:
    """Show a process its own GPUs alone: by uuid, or by number where their ids are node/number.
    One without GPUs sees what the service sees."""
    if not gpu_ids:
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(id.rpartition("/")[2] for id in gpu_ids)}


def told_of_gpus(effect: RunRank) -> dict[str, str]:
    """Tell a job with GPUs its attempt and all that it holds, for the reports of its agent."""
    if not effect.allocation:
        return {}
    return {
        "SLACKWATER_ATTEMPT": str(effect.attempt // RUN_ATTEMPTS),
        "SLACKWATER_GPUS": described(effect.allocation),
    }


def gang_environment(effect: RunRank, node: NodeId) -> dict[str, str]:
    """Tell a rank its place in its gang by the variables that torchrun sets."""
    if not effect.rendezvous:
        return {}
    host, _, port = effect.rendezvous.rpartition(":")
    allocation = effect.allocation or ((node, effect.workers),)
    each = max(1, held(allocation) // effect.workers)
    sizes = [(name, number // each) for name, number in allocation]
    group = [name for name, _ in sizes].index(node)
    first, local = sum(size for _, size in sizes[:group]), sizes[group][1]
    return {
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "WORLD_SIZE": str(effect.workers),
        "RANK": str(effect.rank),
        "LOCAL_WORLD_SIZE": str(local),
        "LOCAL_RANK": str(effect.rank - first),
        "GROUP_WORLD_SIZE": str(len(sizes)),
        "GROUP_RANK": str(group),
        "TORCHELASTIC_RUN_ID": effect.job,  # Tells frameworks that a launcher started all ranks.
    }


def cannot_start(
    program: tuple[str, ...], folder: str, path: str | None = None, venv: str = ""
) -> str:
    """Say why the program cannot be started on this machine; empty: nothing speaks against it.
    `path`: where it is looked for, the service's own by default, after its environment `venv`."""
    remedy = "submit with --folder one that its nodes have"
    if folder and not os.path.isdir(folder):
        return f"there is no folder {folder}; {remedy}"
    name = program[0]
    where = os.path.join(folder, name) if "/" in name else name
    looked_for = in_front(venv, path or os.environ.get("PATH"))
    if name != "python" and shutil.which(where, path=looked_for) is None:
        return f"there is no program {name} that can be run"
    script = next((word for word in program[1:] if not word.startswith("-")), "")
    is_script = name.rpartition("/")[2].startswith("python") and program[1:2] == (script,)
    if is_script and not os.path.isfile(os.path.join(folder, script)):
        return f"there is no script {script} in {folder or os.getcwd()}; {remedy}"
    return ""


def look(
    program: tuple[str, ...], folder: str, path: str | None, venv: str = ""
) -> tuple[str, str]:
    """Return why the program cannot be started here, or the digest of its code. The folder is a
    user's: where its file system does not answer, this does not return."""
    why = cannot_start(program, folder, path, venv)
    return why, "" if why else script_digest(program, folder)


def short_of_room(state_dir: Path) -> str:
    """Say why no job is to be started here; empty: there is room."""
    disk = os.statvfs(state_dir)
    free, least = disk.f_bavail * disk.f_frsize, limits.WORKER_ROOM_BYTES
    if free >= least:
        return ""
    return (
        f"{free / 1e6:.0f} MB are free in {state_dir}, {least / 1e6:.0f} MB are needed to start a "
        "job: make room there, or lower jobs_kept_bytes or log_bytes_max"
    )
