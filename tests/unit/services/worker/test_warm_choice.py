"""Tell which ranks are forked from the warm process, and which start cold."""

import sys
from pathlib import Path

import pytest

from slackwater.schemas.base import NodeId
from slackwater.services.worker.config import WorkerConfig
from slackwater.services.worker.gpus import Device, Inventory
from slackwater.services.worker.warm import at_once, imports, why_cold

GIVEN = {"PATH": "/bin", "OMP_NUM_THREADS": "2", "PYTHONUNBUFFERED": "1"}


@pytest.mark.parametrize(
    ("program", "changed", "why"),
    [
        (("python", "train.py", "--lr", ".1"), {}, ""),
        ((sys.executable, "/data/train.py"), {}, ""),
        (("python", "train.py"), {"RANK": "3", "PATH": "/opt/bin", "SLACKWATER_JOB": "j"}, ""),
        (("python", "train.py"), {"CUDA_VISIBLE_DEVICES": "1"}, ""),
        (("python", "train.py"), {"OMP_NUM_THREADS": "1"}, "OMP_NUM_THREADS is another one"),
        (("python", "train.py"), {"LD_PRELOAD": "x.so"}, "LD_PRELOAD is another one"),
        (("python", "train.py"), {"CUDA_LAUNCH_BLOCKING": "1"}, "CUDA_LAUNCH_BLOCKING is another"),
        (("python", "train.py"), {"PYTHONPATH": "/opt/lib"}, "PYTHONPATH is another one"),
        (("python", "train.py"), {"VIRTUAL_ENV": "/venv"}, "VIRTUAL_ENV is another one"),
        (("python3", "train.py"), {}, "python3 is not the service's interpreter"),
        (("/bin/sh", "-c", "true"), {}, "/bin/sh is not the service's interpreter"),
        (("python",), {}, "only `python SCRIPT.py ...`"),
        (("python", "-m", "train"), {}, "only `python SCRIPT.py ...`"),
        (("python", "-O", "train.py"), {}, "only `python SCRIPT.py ...`"),
        (("python", "package.zip"), {}, "only `python SCRIPT.py ...`"),
    ],
)
def test_only_what_a_fork_can_be_is_forked(
    program: tuple[str, ...], changed: dict[str, str], why: str
) -> None:
    found = why_cold(program, GIVEN | changed, GIVEN)
    assert found.startswith(why)
    assert bool(found) == bool(why)


def test_a_variable_that_a_program_lacks_counts_as_another_one() -> None:
    asked = {name: value for name, value in GIVEN.items() if name != "OMP_NUM_THREADS"}
    assert why_cold(("python", "a.py"), asked, GIVEN).startswith("OMP_NUM_THREADS")


@pytest.mark.parametrize("folders", ["lib", "/opt:", ":/opt", "/opt:.:/lib"])
def test_a_search_path_that_depends_on_the_folder_starts_cold(folders: str) -> None:
    given = GIVEN | {"PYTHONPATH": folders}
    assert "depends on where" in why_cold(("python", "a.py"), given, given)


class Machine:
    def devices(self) -> list[Device]:
        return [Device("GPU-1", "V100", 2**34, "", ())]


@pytest.mark.parametrize(
    ("warm", "gpus", "driver", "begins"),
    [
        ("auto", "auto", Machine(), True),
        ("auto", "auto", None, False),
        ("auto", 4, None, False),
        ("on", 0, None, True),
        ("off", "auto", Machine(), False),
    ],
)
def test_a_node_with_gpus_of_a_driver_warms_up_before_its_first_job(
    warm: str, gpus: int | str, driver: Machine | None, begins: bool, tmp_path: Path
) -> None:
    config = WorkerConfig(warm=warm, gpus=gpus, state_dir=str(tmp_path))  # type: ignore[arg-type]
    assert at_once(config, Inventory(config, NodeId("n"), driver).watched) == begins


def test_what_is_configured_is_imported_and_nothing_else() -> None:
    assert imports(WorkerConfig(warm_imports="jax")) == "jax"
    assert imports(WorkerConfig()).rpartition(",")[2] in ("slackwater.torch", "slackwater.agent")
