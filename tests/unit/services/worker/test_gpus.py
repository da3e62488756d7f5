"""The GPUs of a node, by a driver played in memory: their faults, strangers on them, two holders.

NVIDIA's own driver is asked on machines with GPUs alone; here its library is replaced.
"""

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from slackwater.schemas.base import NodeId
from slackwater.services.worker.config import WorkerConfig
from slackwater.services.worker.gpus import Device, DriverFailed, GpuHeld, Inventory, Nvml, nvidia

NODE = NodeId("n1")
V100 = Device("GPU-1", "Tesla V100-SXM2-32GB", 2**35, "", ())


class PlayedDriver:
    def __init__(self, *devices: Device) -> None:
        self.found = list(devices)
        self.fails = ""

    def devices(self) -> list[Device]:
        if self.fails:
            raise DriverFailed(self.fails)
        return self.found


def inventory(folder: Path, driver: PlayedDriver | None, **config: Any) -> Inventory:
    return Inventory(WorkerConfig(state_dir=str(folder), **config), NODE, driver)


def test_the_driver_s_gpus_are_told_by_uuid_type_and_memory(tmp_path: Path) -> None:
    made = inventory(tmp_path, PlayedDriver(V100, V100._replace(uuid="GPU-2")))
    made.look(frozenset(), 0.0)
    assert [(gpu.index, gpu.id, gpu.type) for gpu in made.gpus] == [
        (0, "GPU-1", "Tesla V100-SXM2-32GB"),
        (1, "GPU-2", "Tesla V100-SXM2-32GB"),
    ]
    assert {gpu.memory_bytes for gpu in made.gpus} == {2**35}


def test_a_number_in_the_configuration_counts_instead(tmp_path: Path) -> None:
    made = inventory(tmp_path, PlayedDriver(V100), gpus=2, gpu_type="fake")
    assert made.look(frozenset(), 0.0) == ()
    assert [gpu.id for gpu in made.gpus] == ["n1/0", "n1/1"]
    assert not made.watched
    assert inventory(tmp_path, PlayedDriver(V100), gpus=0).gpus == ()


def test_without_driver_and_number_a_node_has_no_gpus(tmp_path: Path) -> None:
    made = inventory(tmp_path, None)
    assert (made.look(frozenset(), 0.0), made.gpus) == ((), ())


def test_a_gpu_on_which_a_stranger_computes_is_not_given_to_jobs(tmp_path: Path) -> None:
    driver = PlayedDriver(V100._replace(pids=(41, 42)))
    made = inventory(tmp_path, driver)
    (gpu,) = made.look(frozenset({41}), 0.0)
    assert gpu.fault == "process 42 computes on it, and no job of this node started that"
    assert made.look(frozenset({41}), 0.0) == (), "it is told once"
    (gpu,) = made.look(frozenset({41, 42}), 0.0)
    assert gpu.fault == ""


def test_a_gpu_is_idle_from_the_first_look_of_those_in_a_row(tmp_path: Path) -> None:
    driver = PlayedDriver(V100._replace(busy=0.0))
    made = inventory(tmp_path, driver)
    idle_s = []
    for now_s, busy in (
        (5.0, 0.0),
        (15.0, 0.0),
        (25.0, 0.0),
        (35.0, 0.01),
        (45.0, 0.0),
        (55.0, 0.0),
    ):
        driver.found = [V100._replace(busy=busy)]
        made.look(frozenset(), now_s)
        idle_s.append(made.gpus[0].idle_s)
    assert idle_s == [0.0, 10.0, 20.0, 0.0, 0.0, 10.0]
    driver.found = [V100]
    made.look(frozenset(), 65.0)
    assert made.gpus[0].idle_s == 0.0, "it does not say"


def test_a_driver_that_fails_makes_its_gpus_faulty_until_it_answers(tmp_path: Path) -> None:
    driver = PlayedDriver(V100)
    made = inventory(tmp_path, driver)
    made.look(frozenset(), 0.0)
    driver.fails = "NVML: GPU is lost"
    (gpu,) = made.look(frozenset(), 0.0)
    assert (gpu.id, gpu.fault) == ("GPU-1", "NVML: GPU is lost")
    driver.fails = ""
    (gpu,) = made.look(frozenset(), 0.0)
    assert gpu.fault == ""


def test_a_gpu_has_one_holder_until_the_last_process_that_inherited_it_ends(tmp_path: Path) -> None:
    made = inventory(tmp_path, None, gpus=2)
    held = made.claim(["n1/0"])
    holder = subprocess.Popen(["/bin/sh", "-c", "sleep 300 & wait"], pass_fds=held)
    for descriptor in held:
        os.close(descriptor)
    try:
        with pytest.raises(GpuHeld, match="GPU n1/0 is still held by another process"):
            made.claim(["n1/1", "n1/0"])
        for descriptor in made.claim(["n1/1"]):  # The refused claim gave it back.
            os.close(descriptor)
    finally:
        subprocess.run(["pkill", "-P", str(holder.pid)], check=True)
        holder.wait(20)
    for descriptor in made.claim(["n1/0", "n1/1"]):
        os.close(descriptor)


class Library:
    """Stands in for NVML: two GPUs, of which the second one tells neither errors nor rows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.errors, self.rows = 0, (0, 0, 0, 0)
        played = {
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlDeviceGetCount": lambda: 2,
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}",
            "nvmlDeviceGetName": lambda handle: b"NVIDIA A100",
            "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=2**36),
            "nvmlDeviceGetTotalEccErrors": lambda handle, *_: self.told(handle, self.errors),
            "nvmlDeviceGetRemappedRows": lambda handle: self.told(handle, self.rows),
            "nvmlDeviceGetUtilizationRates": lambda handle: self.told(
                handle, SimpleNamespace(gpu=40)
            ),
            "nvmlDeviceGetComputeRunningProcesses": lambda handle: [SimpleNamespace(pid=7)],
        }
        for name, function in played.items():
            monkeypatch.setattr(pynvml, name, function)

    def told(self, handle: int, value: object) -> object:
        if handle == 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return value


def test_what_nvml_tells_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(monkeypatch)
    driver = nvidia()
    assert driver is not None
    assert driver.devices() == [
        Device("GPU-0", "NVIDIA A100", 2**36, "", (7,), 0.4),
        Device("GPU-1", "NVIDIA A100", 2**36, "", (7,)),
    ]
    library.errors = 3
    assert "3 memory errors" in driver.devices()[0].fault
    library.rows = (0, 1, 1, 0)
    assert "replaced by a spare one" in driver.devices()[0].fault
    library.rows = (0, 1, 0, 1)
    assert "no spare rows left" in driver.devices()[0].fault
    assert driver.devices()[1].fault == ""


def test_a_machine_without_nvidia_s_library_has_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(code: int) -> Any:
        def init() -> None:
            raise pynvml.NVMLError(code)

        return init

    monkeypatch.setattr(pynvml, "nvmlInit", fails(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND))
    assert nvidia() is None
    monkeypatch.setattr(pynvml, "nvmlInit", fails(pynvml.NVML_ERROR_DRIVER_NOT_LOADED))
    driver = nvidia()
    assert isinstance(driver, Nvml)
    with pytest.raises(DriverFailed, match="Driver Not Loaded"):
        driver.devices()
