"""The environment in which a job's program runs. Pure."""

from slackwater.schemas.jobs import (
    AGGREGATE_VARIABLE,
    BATCH_VARIABLE,
    BY_TURNS_VARIABLE,
    CHECKPOINT_VARIABLE,
    CHOOSE_HOSTS_VARIABLE,
    FROM_VARIABLE,
    MEMORY_VARIABLE,
    SAVE_EVERY_VARIABLE,
    SAVE_TO_VARIABLE,
    JobSpec,
)


def launch_environment(spec: JobSpec) -> dict[str, str]:
    """Return the environment of its program that follows from what its user asked for."""
    told = {CHECKPOINT_VARIABLE: spec.checkpoint} if spec.checkpoint else {}
    if spec.start_from:
        told[FROM_VARIABLE] = spec.start_from
    if spec.recover == "rollback":
        told |= {SAVE_TO_VARIABLE: spec.save_to, SAVE_EVERY_VARIABLE: str(spec.save_every_s)}
    if spec.memory_bytes:
        told[MEMORY_VARIABLE] = str(spec.memory_bytes)
    told |= {BY_TURNS_VARIABLE: "1"} if spec.by_turns else {}
    if spec.choose_hosts:
        told[CHOOSE_HOSTS_VARIABLE] = "{}:{}".format(*spec.workers_bounds)
    told |= {AGGREGATE_VARIABLE: spec.aggregate} if spec.aggregate != "auto" else {}
    if spec.batch == "fixed":
        told[BATCH_VARIABLE] = str(spec.batch_size)
    return spec.env | told
