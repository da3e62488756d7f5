"""Measured training jobs: step times by placement and gradient statistics by epoch.

A folder per application, as Pollux's authors published theirs (Qiao, thesis, section 3.5.3), and
Sia's; columns are found by name:

    placements.csv      placement,local_bsz,step_time,sync_time        "134": 1, 3 and 4 GPUs
    scalability.csv     num_nodes,num_replicas,local_bsz,step_time,sync_time
    validation-M.csv    progress,iteration,metric,grad_sqr,grad_var    an epoch a row, batch size M

A placement that was measured is interpolated over the per-GPU batch; any other one linearly over
(machines, GPUs, per-GPU batch); what lies outside of all measurements is answered by the throughput
model fitted to them. Machines in a circle are alike: a placement is known by its smallest rotation.
Gradient statistics are interpolated between the two nearest batch sizes. Progress is counted in
iterations of M0; an epoch ends where the slowest of the measured runs ended it.

GPU types: `placements-TYPE.csv` and `scalability-TYPE.csv` hold what was measured on another type;
a type without files of its own computes at a relative speed and synchronises alike.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from slackwater.common.base.errors import ConfigRejected
from slackwater.common.domains.models.efficiency import GradientMoments
from slackwater.common.domains.models.throughput_table import ThroughputTable
from slackwater.loadgen.traces.record import TraceRejected
from slackwater.loadgen.traces.sheet import Sheet, load

Floats = NDArray[np.float64]
Shape = tuple[int, ...]
"""GPUs on each machine of an allocation."""

_LARGEST: Final = 1e30
"""Squared gradients reach 10^16."""
_TIMES: Final = ("local_bsz", "step_time", "sync_time")
_EPOCH: Final = ("progress", "iteration", "grad_sqr", "grad_var")
PER_GPU_MAX: Final[Mapping[str, int]] = {"yolov3": 8}
"""Where less than the largest measured per-GPU batch fits a GPU's memory in training."""


class StepTimes:
    """One GPU type's measurements: (step, synchronising) seconds for a shape and per-GPU batch."""

    def __init__(self, placements: Floats, names: list[str], scalability: Floats) -> None:
        self._by_shape: dict[str, tuple[Floats, Floats]] = {}
        for name in dict.fromkeys(names):
            rows = placements[[i for i, other in enumerate(names) if other == name]]
            rows = rows[np.argsort(rows[:, 2], kind="stable")]
            self._by_shape[name] = rows[:, 2], rows[:, 3:]
        keys, owner = np.unique(placements[:, :3], axis=0, return_inverse=True)
        owner = owner.reshape(-1)
        means = np.stack(
            [np.bincount(owner, placements[:, c]) / np.bincount(owner) for c in (3, 4)], axis=1
        )
        self.table = ThroughputTable(np.vstack([np.hstack([keys, means]), scalability]))
        """All shapes of as many machines and GPUs in one row: their mean."""
        self._known: dict[tuple[Shape, int], tuple[float, float]] = {}
        self.per_gpu_min = int(placements[:, 2].min())
        self.per_gpu_max = int(placements[:, 2].max())

    def of(self, shape: Shape, per_gpu: int) -> tuple[float, float]:
        key = (shape, per_gpu)
        if key not in self._known:
            self._known[key] = self._look_up(shape, per_gpu)
        return self._known[key]

    def _look_up(self, shape: Shape, per_gpu: int) -> tuple[float, float]:
        nodes, gpus = len(shape), sum(shape)
        name = "".join(map(str, min(shape[i:] + shape[:i] for i in range(nodes))))
        if name in self._by_shape:
            sizes, times = self._by_shape[name]
            if sizes[0] <= per_gpu <= sizes[-1]:
                step, sync = (float(np.interp(per_gpu, sizes, times[:, c])) for c in (0, 1))
                return step, sync
        step_s, sync_s = self.table.step_times(nodes, gpus, per_gpu)
        return float(step_s), float(sync_s)


class Application:
    """A model that was trained at several batch sizes. M0 is the smallest of them."""

    def __init__(
        self, name: str, times: Mapping[str, StepTimes], runs: Mapping[int, Floats]
    ) -> None:
        self.name = name
        self._times = times
        self._sizes = sorted(runs)
        self._runs = runs
        self.batch_initial, self.batch_max = self._sizes[0], self._sizes[-1]
        self.epochs = min(len(run) for run in runs.values())
        self._progress = [0.0] + [
            min(float(run[epoch, 0]) for run in runs.values()) for epoch in range(self.epochs)
        ]
        self._moments: dict[tuple[float, int], GradientMoments] = {}
        self.alone_s: dict[tuple[int, int], list[float]] = {}
        """(GPUs, batch) -> seconds to the end of each epoch, kept by the run that worked it out."""

    def progress_at(self, epoch: int) -> float:
        """Iterations of M0 that are done when so many epochs are."""
        return self._progress[epoch]

    def step_times(self, shape: Shape, per_gpu: int, gpu_type: str = "") -> tuple[float, float]:
        """(step, synchronising) seconds of one iteration without accumulation."""
        return self._times.get(gpu_type, self._times[""]).of(shape, per_gpu)

    def throughput(self, gpu_type: str = "") -> ThroughputTable:
        """All that was measured on that type, or else on the reference type."""
        return self._times.get(gpu_type, self._times[""]).table

    def per_gpu_bounds(self, gpu_type: str = "") -> tuple[int, int]:
        """The smallest and the largest batch that a GPU of that type was measured with, or may
        hold."""
        times = self._times.get(gpu_type, self._times[""])
        most = times.per_gpu_max
        if gpu_type not in self._times or not gpu_type:
            most = PER_GPU_MAX.get(self.name, most)
        return times.per_gpu_min, most

    @property
    def gpu_types(self) -> list[str]:
        """Types with measurements; "" is the reference."""
        return sorted(self._times)

    def measured(self, gpu_type: str) -> bool:
        """Has this GPU type measurements of its own?"""
        return gpu_type in self._times

    def moments(self, batch: float, epoch: int) -> GradientMoments:
        """Gradient statistics with this batch during an epoch (counted from 0)."""
        key = (batch, epoch)
        if key not in self._moments:
            sqr, var = self._between(batch, epoch, 2), self._between(batch, epoch, 3)
            self._moments[key] = GradientMoments(sqr, var)
        return self._moments[key]

    def iterations_at(self, batch: float, epoch: int) -> float:
        """Iterations that a run with this batch took to complete the epoch (counted from 0)."""
        return self._between(batch, epoch, 1)

    def _between(self, batch: float, epoch: int, column: int) -> float:
        values = [float(self._runs[size][epoch, column]) for size in self._sizes]
        return float(np.interp(batch, self._sizes, values))


def read_applications(folder: Path, time_scale: float = 1.0) -> dict[str, Application]:
    """Every application below `folder`, by name; its times are multiplied by `time_scale`."""
    found = {
        path.parent.name: _read_application(path.parent, time_scale)
        for path in sorted(folder.glob("*/placements.csv"))
    }
    if not found:
        raise ConfigRejected(
            f"no profiles in {folder}: expected a folder per application with placements.csv; "
            "name it with --set profiles.folder=DIR, or set SLACKWATER_TRACES"
        )
    return found


def _read_application(folder: Path, time_scale: float) -> Application:
    times = {"": _read_times(folder, "", time_scale)}
    for path in sorted(folder.glob("placements-*.csv")):
        gpu_type = path.stem.removeprefix("placements-")
        times[gpu_type] = _read_times(folder, f"-{gpu_type}", time_scale)
    runs = {
        int(path.stem.removeprefix("validation-")): _table(path, _EPOCH)
        for path in folder.glob("validation-*.csv")
    }
    if not runs:
        raise ConfigRejected(f"{folder} has no validation-BATCH.csv; progress can't be known")
    application = Application(folder.name, times, runs)
    for before, after in pairwise(map(application.progress_at, range(application.epochs + 1))):
        if after <= before:
            raise ConfigRejected(f"{folder}: progress falls from {before} to {after}")
    return application


def _read_times(folder: Path, suffix: str, time_scale: float) -> StepTimes:
    sheet = _sheet(folder / f"placements{suffix}.csv", "placement", *_TIMES)
    names, placements = [], []
    for _ in sheet.rows():
        name = sheet.text("placement")
        if not (name.isascii() and name.isdigit()) or "0" in name:
            sheet.refuse("placement", "a digit from 1 for each machine, such as 134")
        names.append(name)
        placements.append([len(name), sum(map(int, name)), *_numbers(sheet, _TIMES)])
    if not placements:
        raise ConfigRejected(f"{sheet.path} has no rows; give one per placement and batch")
    path = folder / f"scalability{suffix}.csv"
    columns = ("num_nodes", "num_replicas", *_TIMES)
    beyond = _table(path, columns) if path.exists() else np.empty((0, 5))
    scales = np.array([1.0, 1.0, 1.0, time_scale, time_scale])
    return StepTimes(np.array(placements, dtype=np.float64) * scales, names, beyond * scales)


def _table(path: Path, columns: Sequence[str]) -> Floats:
    """These columns of a file, in this order whatever the file's own."""
    sheet = _sheet(path, *columns)
    rows = [_numbers(sheet, columns) for _ in sheet.rows()]
    return np.array(rows, dtype=np.float64).reshape(-1, len(columns))


def _numbers(sheet: Sheet, columns: Sequence[str]) -> list[float]:
    return [sheet.number(column, 0.0, _LARGEST) for column in columns]


def _sheet(path: Path, *columns: str) -> Sheet:
    sheet = Sheet(path, load(path)[1])
    for column in columns:
        if column not in sheet:
            raise TraceRejected(
                path,
                1,
                column,
                None,
                f"a column of that name; {path.name} has {', '.join(sheet.columns)}",
            )
    return sheet
