"""The GPUs of a node: which there are, which are healthy, and who holds them.

They are read from NVIDIA's driver (NVML) where there is one, unless the configuration names their
number. A GPU with memory errors that the driver could not mend, or one that a stranger's process
computes on, is told with its fault, and no job is given it.

Each process of a rank holds an open, locked file for each of its GPUs. A second holder is refused,
whatever the master believed: so fake GPUs, too, cannot be given twice without being noticed.
"""

import fcntl
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import pynvml
from msgspec.structs import replace

from slackwater.common.base.errors import SlackwaterError
from slackwater.schemas.base import NODE_GPUS_MAX, NodeId
from slackwater.schemas.gpus import GPU_TYPE_CHARS_MAX, Gpu
from slackwater.services.worker.config import WorkerConfig, configured_gpus

LOOK_S: Final = 10.0
"""Seconds between two looks at the driver."""


class DriverFailed(SlackwaterError):
    """The driver is there and does not answer; it may later."""


class GpuHeld(SlackwaterError):
    """A process holds the GPU that another one was to get."""


class Device(NamedTuple):
    """A GPU as its driver tells it."""

    uuid: str
    name: str
    memory_bytes: int
    fault: str
    """Why it cannot be trusted; empty: it can."""
    pids: tuple[int, ...]
    """Processes that compute on it."""
    busy: float | None = None
    """The part of the last moment in which it computed; None: the driver does not say."""


class Driver(Protocol):
    """Tells the GPUs of a machine."""

    def devices(self) -> list[Device]:
        """List them as CUDA numbers them. Raises DriverFailed."""


class Nvml:
    """NVIDIA's driver."""

    def __init__(self) -> None:
        self._begun = False

    def devices(self) -> list[Device]:
        try:
            if not self._begun:
                pynvml.nvmlInit()
                self._begun = True
            return [_device(pynvml.nvmlDeviceGetHandleByIndex(n)) for n in range(_count())]
        except pynvml.NVMLError as error:
            raise DriverFailed(f"NVML: {error}") from error


def nvidia() -> Driver | None:
    """Return NVIDIA's driver; None: this machine has none."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound:
        return None
    except pynvml.NVMLError:  # Each look tries again, and says why it failed.
        return Nvml()
    pynvml.nvmlShutdown()
    return Nvml()


def _count() -> int:
    return min(int(pynvml.nvmlDeviceGetCount()), NODE_GPUS_MAX)


def _device(handle: Any) -> Device:
    fault = ""
    errors = _asked(
        pynvml.nvmlDeviceGetTotalEccErrors, handle,
        pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC,
    )  # fmt: skip
    if errors:
        fault = f"{errors} memory errors that could not be corrected; reset it"
    rows = _asked(pynvml.nvmlDeviceGetRemappedRows, handle)
    if rows is not None and rows[3]:
        fault = "its memory has no spare rows left; have it replaced"
    elif rows is not None and rows[2]:
        fault = "a row of its memory is to be replaced by a spare one; reset it"
    rates = _asked(pynvml.nvmlDeviceGetUtilizationRates, handle)
    pids = tuple(process.pid for process in _asked(_computing, handle) or ())
    return Device(
        uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
        name=_text(pynvml.nvmlDeviceGetName(handle))[:GPU_TYPE_CHARS_MAX],
        memory_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
        fault=fault,
        pids=pids,
        busy=None if rates is None else rates.gpu / 100.0,
    )


def _computing(handle: Any) -> Any:
    return pynvml.nvmlDeviceGetComputeRunningProcesses(handle)


def _asked(ask: Any, *arguments: Any) -> Any:
    """Ask for what not every GPU tells; None: this one does not."""
    try:
        return ask(*arguments)
    except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_NoPermission):
        return None


def _text(found: str | bytes) -> str:
    return found.decode(errors="replace") if isinstance(found, bytes) else found


class Inventory:
    """The GPUs of one node. `driver` tells them, unless the configuration does."""

    def __init__(self, config: WorkerConfig, node: NodeId, driver: Driver | None) -> None:
        self._locks = Path(config.state_dir) / "gpus"
        self._driver = driver if config.gpus == "auto" else None
        self.gpus = configured_gpus(config, node)
        self.failure = ""
        """Why the driver did not answer last time."""
        self._idle_since_s: dict[str, float] = {}
        """The first look of those in a row that found a GPU idle, by its uuid."""

    @property
    def watched(self) -> bool:
        """Say whether `look` may find something new."""
        return self._driver is not None

    def look(self, ours: frozenset[int], now_s: float) -> tuple[Gpu, ...]:
        """Ask the driver, and return the GPUs whose fault is another one now. `ours`: processes of
        this node's ranks. While the driver fails, every GPU that was there has that fault."""
        if self._driver is None:
            return ()
        before = {gpu.id: gpu for gpu in self.gpus}
        try:
            found = self._driver.devices()
            self.failure = ""
        except DriverFailed as error:
            self.failure = str(error)
            self.gpus = tuple(replace(gpu, fault=self.failure) for gpu in self.gpus)
        else:
            self.gpus = tuple(
                Gpu(
                    index=index, id=device.uuid, type=device.name,
                    memory_bytes=device.memory_bytes, fault=device.fault or _used(device, ours),
                    idle_s=self._idle_s(device, now_s),
                )
                for index, device in enumerate(found)
            )  # fmt: skip
        return tuple(
            gpu
            for gpu in self.gpus
            if gpu.fault != (before[gpu.id].fault if gpu.id in before else "")
        )

    def _idle_s(self, device: Device, now_s: float) -> float:
        """Return for how long each look found the GPU idle."""
        if device.busy is None or device.busy > 0.0:
            self._idle_since_s.pop(device.uuid, None)
            return 0.0
        return now_s - self._idle_since_s.setdefault(device.uuid, now_s)

    def claim(self, ids: Sequence[str]) -> list[int]:
        """Lock the GPUs' files, and return their descriptors for the rank's process to inherit;
        close them once it has. Raises GpuHeld, OSError."""
        self._locks.mkdir(parents=True, exist_ok=True)
        held: list[int] = []
        try:
            for id in ids:
                path = self._locks / f"{id.replace('/', '_')}.lock"
                held.append(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
                fcntl.flock(held[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException as error:
            for descriptor in held:
                os.close(descriptor)
            if isinstance(error, BlockingIOError):
                raise GpuHeld(f"GPU {id} is still held by another process ({path})") from error
            raise
        return held


def _used(device: Device, ours: frozenset[int]) -> str:
    strangers = [pid for pid in device.pids if pid not in ours]
    if not strangers:
        return ""
    return f"process {strangers[0]} computes on it, and no job of this node started that"
