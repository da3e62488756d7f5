"""GPUs as people write and read them: `V100=0.5`, `128:4096`, `w1:4,w2:2`."""

import re
from collections.abc import Iterable

from slackwater.console.outcome import Usage
from slackwater.console.usage import shown
from slackwater.schemas.base import COUNT_MAX
from slackwater.schemas.gpus import (
    GPU_TYPE_CHARS_MAX,
    GPU_TYPES_MAX,
    SPEED_MAX,
    described,
    held,
)
from slackwater.schemas.job_states import HOLDING_STATES
from slackwater.schemas.jobs import JobRecord


def gpu_type_named(name: str) -> str:
    """Check a GPU type's name. Raises Usage."""
    if not 1 <= len(name) <= GPU_TYPE_CHARS_MAX:
        raise Usage(
            f"--gpu-type {shown(name)}: give a name of 1 to {GPU_TYPE_CHARS_MAX} characters"
        )
    return name


def gpu_types(texts: Iterable[str]) -> dict[str, float]:
    """Read TYPE or TYPE=SPEED of each type; without a speed it is 1. Raises Usage."""
    found = {}
    for text in texts:
        name, _, speed = text.rpartition("=") if "=" in text else (text, "", "1")
        try:
            factor = float(speed)
        except ValueError:
            factor = 0.0
        if not 0.0 < factor <= SPEED_MAX:
            raise Usage(
                f"--gpu-type {shown(text)}: the speed {shown(speed)} is not a number above 0 and "
                "at most 1e6; write a type as V100, or with its speed as V100=2.5"
            )
        if name in found:
            raise Usage(f"--gpu-type {shown(text)}: {name} is given twice; give each type once")
        found[gpu_type_named(name)] = factor
    if len(found) > GPU_TYPES_MAX:
        raise Usage(f"--gpu-type: {len(found)} types are given; give at most {GPU_TYPES_MAX}")
    return found


def batch_bounds(text: str) -> dict[str, int | str]:
    """Read SIZE, SIZE:fixed, or MIN:MAX of a batch that begins with MIN. Raises Usage."""
    text, fixed = text.strip().removesuffix(":fixed"), text.strip().endswith(":fixed")
    parts = re.fullmatch(r"(\d{1,16})(?::(\d{1,16}))?", text.strip())
    least, most = (int(parts[1]), int(parts[2] or 0)) if parts else (0, 0)
    if not 1 <= least <= COUNT_MAX or most > COUNT_MAX:
        raise Usage(
            f"--batch {shown(text)}: write a size such as 128, or 128:fixed, or bounds: 128:4096"
        )
    sizes = {"batch_size": least, "batch_min": least if most else 0, "batch_max": most}
    return sizes | ({"batch": "fixed"} if fixed else {})


def gpus_held(record: JobRecord) -> str:
    """Show how many GPUs a job holds of those that it asked for; empty: it asked for none."""
    if not record.spec.gpus:
        return ""
    now = held(record.allocation) if record.state in HOLDING_STATES else 0
    return f"{now}/{record.spec.gpus}"


def place(record: JobRecord) -> str:
    """Show where a job is: its node, and how much on which where it has GPUs or several nodes."""
    allocation = record.allocation
    if record.spec.gpus or len(allocation) > 1:
        return described(allocation)
    return allocation[0][0] if allocation else record.node or ""


def asked(record: JobRecord) -> str:
    """Describe the GPUs that a job asks for: how many, between which bounds, of which types."""
    spec, (least, most) = record.spec, record.spec.gpu_bounds
    parts = [str(spec.gpus)]
    if (least, most) != (spec.gpus, spec.gpus):
        when = "while it runs" if spec.adaptive else "when it starts"
        parts.append(f"from {least} to {most} {when}")
    if spec.gpu_types:
        types = (t if s == 1.0 else f"{t} (speed {s:g})" for t, s in spec.gpu_types.items())
        parts.append(" or ".join(types))
    return ", ".join(parts)
