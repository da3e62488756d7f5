"""Jobs of a trace as light programs on GPUs: as long as the trace says, and as many processes as
GPUs, so that any placement suits them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from slackwater.common.base.errors import Rejected
from slackwater.loadgen.fidelity import program, waiting_program
from slackwater.loadgen.simulator.gpu.jobmodels.profiles import ProfileRun
from slackwater.loadgen.simulator.gpu.workload import Submission
from slackwater.schemas.base import WORKERS_MAX
from slackwater.schemas.jobs import JobSpec

ITERATION_S: Final = 0.1
"""Seconds of an iteration where the trace does not tell any, about: what a stopped job does again
is half of one."""
ITERATIONS_IN_ONE: Final = 15
"""Iterations of a trace that is played sixty times as fast which make one: their time depends on
the model and the GPUs, and so does its."""
ITERATION_S_MIN: Final = 0.02
ITERATION_S_MAX: Final = 0.3
SAVE_S: Final = 0.5
"""Seconds that a stopped job saves for."""


class LiveJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job of the trace, and as what it is submitted."""

    submission: Submission
    spec: JobSpec
    folder: Path
    iterations: float
    """Its work: whole iterations, or those of the smallest batch where a profile says them."""
    iteration_s: float
    """0: a profile says what one takes."""


def live_jobs(
    submissions: Sequence[Submission],
    folder: Path,
    prefix: str = "f",
    save_s: float = SAVE_S,
) -> list[LiveJob]:
    """Make the jobs, numbered in the trace's order; each saves into a folder of its own under
    `folder`. Raises Rejected for a job with more GPUs than a job may have processes."""
    return [_live(each, folder, prefix, save_s) for each in submissions]


def _live(job: Submission, folder: Path, prefix: str, save_s: float) -> LiveJob:
    gpus = job.spec.gpus
    if gpus > WORKERS_MAX:
        raise Rejected(
            f"job {job.spec.id} asks for {gpus} GPUs, and a live job has at most {WORKERS_MAX} "
            "processes; leave it out (--max-gpus)"
        )
    id = f"{prefix}{job.number:04d}"
    iteration_s = ITERATION_S
    if job.oracle.iteration_s:
        longer_s = ITERATIONS_IN_ONE * job.oracle.iteration_s
        iteration_s = min(max(longer_s, ITERATION_S_MIN), ITERATION_S_MAX)
    iterations = max(1, round(job.oracle.duration_s / iteration_s))
    each_s = job.oracle.duration_s / iterations
    saves = (folder / id).absolute()
    words = (str(saves), str(iterations), repr(each_s), repr(save_s))
    spec = JobSpec(
        id=id,
        model=job.spec.model,
        tenant=job.spec.tenant,
        priority=job.spec.priority,
        gpus=gpus,
        workers=gpus,
        iterations=iterations,
        program=("python", "-I", "-S", str(Path(program.__file__).resolve()), *words),
        checkpoint=str(saves),
    )
    return LiveJob(
        submission=job, spec=spec, folder=saves, iterations=iterations, iteration_s=each_s
    )


def profiled_jobs(
    submissions: Sequence[Submission], runs: Mapping[str, ProfileRun], folder: Path, socket: Path
) -> list[LiveJob]:
    """Make jobs whose training is reckoned by the experiment (see `training`). `runs`: by the
    submission's id, for the work of each."""
    made = []
    for each in submissions:
        words = (str(Path(waiting_program.__file__).resolve()), str(socket), repr(SAVE_S))
        spec = msgspec.structs.replace(
            each.spec, id=f"p{each.number:04d}", workers=each.spec.gpus, iterations=1,
            program=("python", "-I", "-S", *words),
        )  # fmt: skip
        work = runs[each.spec.id].work_total
        place = folder / spec.id
        made.append(
            LiveJob(submission=each, spec=spec, folder=place, iterations=work, iteration_s=0.0)
        )
    return made


class Attempt(msgspec.Struct, frozen=True):
    """One attempt of a job, as its first rank wrote it down."""

    attempt: int
    began_s: float
    ended_s: float
    before: float
    """Iterations."""
    after: float


def attempts(job: LiveJob) -> dict[int, Attempt]:
    """Read what its programs wrote, by attempt; one that was killed wrote nothing."""
    try:
        lines = (job.folder / "attempts").read_text().splitlines()
    except FileNotFoundError:
        return {}
    rows = (line.split() for line in lines)
    found = (Attempt(int(n), float(a), float(b), int(i), int(j)) for n, a, b, i, j in rows)
    return {each.attempt: each for each in found}


def progress(job: LiveJob) -> int:
    """Return the iterations that its program told last."""
    try:
        return int((job.folder / "now").read_text())
    except FileNotFoundError:
        return 0
