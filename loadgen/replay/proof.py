"""Whether a completed emulated job computed what synchronous training means, to the last bit."""

import itertools

import msgspec

from slackwater.loadgen.emulate import Emulation
from slackwater.loadgen.verify import replay_digest
from slackwater.schemas.jobs import JobRecord, JobSpec


class Result(msgspec.Struct):
    """The report of each rank of an emulated job."""

    iterations: int
    digest: str


def emulation_of(spec: JobSpec) -> Emulation:
    """Return the parameters that determine every byte of the job, from the program that it runs."""
    words = spec.program
    given = {word: value for word, value in itertools.pairwise(words) if word[:2] == "--"}
    return Emulation(
        model=given["--model"],
        bytes_scale=float(given["--bytes-scale"]),
        seed=int(given["--seed"]),
        gradient_dtype=spec.gradient_dtype,
    )


def mismatch(record: JobRecord) -> str | None:
    """Why the job's final parameters are not, or cannot be, those of a single-process replay of its
    seeded gradients; None: they are equal on every rank, bit for bit."""
    spec = record.spec
    digests = set()
    for rank in range(spec.workers):
        try:
            result = msgspec.json.decode(record.results.get(str(rank), ""), type=Result)
        except msgspec.MsgspecError as error:
            return f"job {spec.id}, rank {rank}: no result to compare ({error})"
        if result.iterations != spec.iterations:
            return (
                f"job {spec.id}, rank {rank}: {result.iterations} updates were applied, "
                f"{spec.iterations} were pushed"
            )
        digests.add(result.digest)
    if spec.consistency != "synchronous":
        return f"job {spec.id} is {spec.consistency}: its parameters depend on who comes first"
    expected = replay_digest(emulation_of(spec), spec.workers, spec.iterations, spec.update)
    if digests != {expected}:
        return (
            f"job {spec.id}: its parameters differ from a single-process replay of its gradients "
            f"({', '.join(sorted(d[:12] for d in digests))}, expected {expected[:12]})"
        )
    return None
