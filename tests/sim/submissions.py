"""Jobs for the simulator out of flat fields, as tests write them."""

from typing import Any

from msgspec.structs import replace

from slackwater.loadgen.simulator.gpu.workload import Oracle, Submission
from slackwater.schemas.jobs import JobSpec


def submission(number: int = 0, *, submit_s: float = 0, **fields: Any) -> Submission:
    """`fields` are those of the job's spec and of its oracle. Left out: an id made of the number.
    A job with bounds of its size may change while it runs."""
    known = {name: fields.pop(name) for name in Oracle.__struct_fields__ if name in fields}
    spec = {"id": f"j{number}", "adaptive": "gpus_max" in fields, **fields}
    return Submission(
        spec=JobSpec(**spec), oracle=Oracle(**known), number=number, submit_s=submit_s
    )


def changed(job: Submission, **fields: Any) -> Submission:
    """The same job with other fields of its spec and of its oracle."""
    oracle = {name: fields.pop(name) for name in Oracle.__struct_fields__ if name in fields}
    asked = {"adaptive": True, **fields} if "gpus_max" in fields else fields
    return replace(job, spec=replace(job.spec, **asked), oracle=replace(job.oracle, **oracle))
