"""Checks of a job's fields that belong together."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slackwater.schemas.jobs import JobSpec


def check_workers(spec: "JobSpec") -> None:
    """Raise ValueError where a job's number of workers is not within its bounds."""
    if spec.gpus:
        raise ValueError(
            "workers_min, workers_max: a job with GPUs has gpus_min and gpus_max; give those"
        )
    if spec.consistency == "stale-synchronous":
        raise ValueError(
            f"workers_min, workers_max: the job is {spec.consistency} and keeps its number of "
            "workers, as the slowest one bounds the others: leave them out"
        )
    least, most = spec.workers_min or spec.workers, spec.workers_max or spec.workers
    if not least <= spec.workers <= most:
        raise ValueError(
            f"workers: {spec.workers}, not within its bounds {least} to {most} (workers_min, "
            "workers_max); give the number that it begins with"
        )


def check_batch(spec: "JobSpec") -> None:
    """Raise ValueError where a job's batch is not within its bounds."""
    asked = spec.batch_size
    least, most = spec.batch_min or asked, spec.batch_max or asked
    if not asked:
        raise ValueError(
            f"batch_size: 0 beside bounds {spec.batch_min} to {spec.batch_max}; give the batch "
            "that it begins with"
        )
    if least > asked:
        raise ValueError(f"batch_min: {least}, more than batch_size {asked}; give at most {asked}")
    if most < asked:
        raise ValueError(f"batch_max: {most}, less than batch_size {asked}; give at least {asked}")


def holds_nul(program: tuple[str, ...], folder: str, env: dict[str, str]) -> str:
    """Say which of these holds a NUL character, with which no program can be started; empty:
    none."""
    if any("\0" in word for word in program):
        return "program: a word of it holds a NUL character"
    if "\0" in folder:
        return "folder: it holds a NUL character"
    names = [name for name, value in env.items() if "\0" in value]
    return f"env: {names[0]} holds a NUL character" if names else ""
