"""How far to shrink tensors on this machine, so that an emulated job keeps a real share of an
aggregator busy.

The papers' servers fold a VGG19 iteration in about a third of its computing time. How many bytes
that is depends on the memory bandwidth at hand, so the bytes are an input that is chosen by the
kernel's measured speed, and then by what a cluster's profiler says of a job of that size
(experiment.py); the duty that results is measured in the run and reported beside its target.
"""

import time
from dataclasses import dataclass

import numpy as np

from slackwater.common.domains.slots.layout import folded_bytes
from slackwater.common.domains.slots.rules import Hyper, scalars
from slackwater.loadgen import models
from slackwater.loadgen.replay.workload import COMPUTE_S, UPDATE

REFERENCE = "vgg19"
DUTY = 0.255
"""The reference's duty with the kernel alone; under a whole cluster it comes out at .27 to .39."""
PROBE = "alexnet"
PROBE_DUTY = 1.0
"""The probe's duty as the cluster profiles it; VGG19's comes out at .31 to .36 then. Above 1.1
AlexNet iterates in 144 to 150 ms, which no cycle of VGG19's holds within the loss limit."""
PROBE_ITERATIONS = 36
PROBE_S = 5.0
"""Seconds that a probing job trains at least, however short its iterations: profiling takes
time."""
ELEMENTS = 8 * 2**20
WORKERS = 2
CHARGE_MARGIN = 3.0
"""A fold is charged so many times what it costs on this machine when it is alone: the real one fits
into its slot beside other work, too."""
ELEMENT_BYTES = 4
REPEATS = 7
BYTES_SCALE_MAX = 1.0


def fold_s_per_element(workers: int = WORKERS) -> float:
    """CPU seconds that one element of an update costs, warm: that many gradients, SGD with
    momentum; the lower quartile, as the aggregators profile it."""
    from slackwater.common.domains.slots import kernels  # numba: not every command needs it.

    slots = np.full(workers * ELEMENTS, 1e-3, dtype=np.float32)
    parameters, momentum = (
        (np.ones(ELEMENTS, np.float32), np.ones(ELEMENTS, np.float32)) for _ in range(2)
    )
    k = scalars(Hyper.of(UPDATE), 1, workers)
    seconds = []
    for _ in range(REPEATS + 1):
        before_s = time.thread_time()
        kernels.fold_chunk(
            UPDATE.name, slots, ELEMENTS, workers, (0, ELEMENTS), parameters, [momentum], k
        )
        seconds.append(time.thread_time() - before_s)
    return sorted(seconds[1:])[REPEATS // 4] / ELEMENTS


def bytes_scale(cpu_share: float, time_scale: float = 1.0, duty: float = DUTY) -> float:
    """The scale at which a 2-worker VGG19 job keeps `duty` of a `cpu_share` server busy."""
    budget_s = duty * cpu_share * COMPUTE_S[REFERENCE] * time_scale
    elements = models.parameters(models.tensors(REFERENCE))
    return min(BYTES_SCALE_MAX, round(budget_s / (fold_s_per_element() * elements), 3))


@dataclass(frozen=True, slots=True)
class Charge:
    """The charge of a fold for each byte that it goes through (AggregatorConfig), and the scale of
    the tensors with which that keeps a job as busy as it shall be."""

    ns_per_byte: float
    bytes_scale: float


def charge(cpu_share: float, compute_s: float, duty: float) -> Charge:
    """Return a charge of CHARGE_MARGIN times what a fold costs on this machine now.

    Its scale is the one at which a 2-worker job of REFERENCE that computes for `compute_s` keeps
    `duty` of a `cpu_share` server busy.
    """
    per_element_s = CHARGE_MARGIN * fold_s_per_element()
    elements = models.parameters(models.tensors(REFERENCE))
    scale = min(BYTES_SCALE_MAX, round(duty * cpu_share * compute_s / per_element_s / elements, 4))
    # Rounding the scale, or its bound, shall not change the duty.
    per_element_s = duty * cpu_share * compute_s / scale / elements
    return Charge(1e9 * per_element_s / folded_bytes(ELEMENT_BYTES, WORKERS), scale)
