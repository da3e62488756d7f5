"""Ids for jobs that are submitted without one, what is said of a submission, and policies by
name."""

import re
import secrets
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from slackwater.common.base.errors import ConfigRejected
from slackwater.console.outcome import Usage
from slackwater.schemas.job_states import STATE_SAID, TERMINAL_STATES
from slackwater.schemas.jobs import Aggregation, JobRecord, JobSpec

EMULATED: Final = "slackwater.loadgen.emulate"
"""The module that emulates a job's training: a word of such a job's program."""
STEM_CHARS_MAX: Final = 40
SUFFIX_BYTES: Final = 3
DEFAULT_GPU_POLICY: Final = "fifo"


def new_id(model: str | None, program: Sequence[str] | None) -> str:
    """Make a readable id: the model or the script, and a suffix that tells it from others."""
    return readable(model or _script(program or ()), secrets.token_hex(SUFFIX_BYTES))


def readable(name: str, suffix: str) -> str:
    """Make an id of any name: train_v2.py becomes train-v2-SUFFIX."""
    return f"{stem_of(name)}-{suffix}"


def stem_of(name: str) -> str:
    """Return what an id says of a name, itself an id: train_v2.py becomes train-v2."""
    stem = re.sub(r"\.(py|sh)$", "", name.rpartition("/")[2])
    words = "-".join(re.findall(r"[A-Za-z0-9]+", stem))[:STEM_CHARS_MAX].strip("-").lower()
    return words or "job"


def _script(program: Sequence[str]) -> str:
    """Return the program's first word that names a script, else its first word."""
    scripts = [word for word in program if word.endswith((".py", ".sh"))]
    modules = [word for flag, word in pairwise(program) if flag == "-m"]
    return next(iter([*scripts, *modules, *program]), "")


def said(spec: JobSpec, known: JobRecord | None) -> str:
    """Say what a submission did. `known`: the record of a job that was there already."""
    if known is None:
        return f"job {spec.id} is stored"
    done = f"job {spec.id} was stored before and {STATE_SAID[known.state]}: nothing new was started"
    if known.state in TERMINAL_STATES:
        return f"{done}; `slackwater rerun {spec.id}` runs it again"
    return done


def policy_named(name: str, option: str = "--policy") -> Aggregation:
    """Check the name given with `option`. Raises Usage for one that is not registered here."""
    from slackwater.services.controller.policies import known_policies

    known = known_policies()
    if name not in known:
        raise Usage(f"{option} {name!r}: choose one of {', '.join(known)}")
    return name


def gpu_policy_named(name: str) -> str:
    """Check the policy's name. Raises Usage for one that no running cluster can use."""
    if name == DEFAULT_GPU_POLICY:
        return name  # Known, without loading all of them.
    from slackwater.services.master.config import MasterConfig
    from slackwater.services.master.gpu_policy import scheduler

    try:
        scheduler(MasterConfig(), name, {})
    except ConfigRejected as error:
        raise Usage(f"--gpu-policy: {error}") from None
    return name
