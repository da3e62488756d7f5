"""Every Python of a rank patches modules once its program imports them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slackwater.services.worker.stacks import python_path

MODELS = """
class DistributedDataParallel:
    def __init__(self, model):
        print("wrapped", model)
"""
GROUPS = """
def init_process_group(*arguments, **options):
    print("begun")
def get_world_size():
    return 2
def get_rank():
    return 0
"""
DDP = """
from torch.nn.parallel.distributed import DistributedDataParallel
def install():
    begin = DistributedDataParallel.__init__
    def wrap(self, model):
        begin(self, model)
        print("hooked", model)
    DistributedDataParallel.__init__ = wrap
"""
PROGRAM = """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
for model in {models}:
    DistributedDataParallel(model)
"""


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """Lay packages that stand for torch and Slackwater, and import one another as these do."""
    files = {
        "torch/__init__.py": "", "torch/nn/__init__.py": "",
        "torch/nn/parallel/__init__.py": "from .distributed import DistributedDataParallel",
        "torch/nn/parallel/distributed.py": MODELS,
        "torch/distributed/__init__.py": "from .distributed_c10d import *",
        "torch/distributed/distributed_c10d.py": GROUPS,
        "slackwater/__init__.py": "", "slackwater/torch/__init__.py": "",
        "slackwater/torch/ddp.py": DDP,
    }  # fmt: skip
    for name, text in files.items():
        path = tmp_path / "packages" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "packages"


def said(packages: Path, program: str, **more: str) -> list[str]:
    """Run the program as a rank's Python, and return its lines, those on stderr last."""
    given = {"PATH": os.environ["PATH"], "PYTHONPATH": str(packages), "SLACKWATER_JOB": "j", **more}
    environment = {**given, **python_path(given)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [*done.stdout.splitlines(), *done.stderr.splitlines()]


def test_each_model_that_is_wrapped_is_hooked(packages: Path) -> None:
    lines = said(packages, PROGRAM.format(models=["a", "b"]))
    assert lines == ["begun", "wrapped a", "hooked a", "wrapped b", "hooked b"]


@pytest.mark.parametrize("more", [{"SLACKWATER_AGGREGATE": "off"}, {"SLACKWATER_JOB": ""}])
def test_a_program_that_is_not_to_aggregate_is_as_it_was(
    packages: Path, more: dict[str, str]
) -> None:
    assert said(packages, PROGRAM.format(models=["a"]), **more) == ["begun", "wrapped a"]


def test_ranks_that_wrap_no_model_are_told_at_their_end(packages: Path) -> None:
    first, told = said(packages, PROGRAM.format(models=[]))
    assert first == "begun"
    assert told.startswith("slackwater: the program wrapped no model in DistributedDataParallel")


def test_a_python_without_slackwater_trains_plainly_and_says_so(packages: Path) -> None:
    (packages / "slackwater/torch/ddp.py").unlink()
    *plain, told = said(packages, PROGRAM.format(models=["a"]))
    assert plain == ["begun", "wrapped a"]
    assert "plain DistributedDataParallel: this Python cannot import slackwater" in told


def test_modules_that_are_imported_already_are_patched_at_once(packages: Path) -> None:
    """So it is in a child of the warm process, which has imported torch."""
    before = "import os, sys, torch.distributed, torch.nn.parallel\n"
    after = "os.environ['SLACKWATER_JOB'] = 'j'\nsys.modules['sitecustomize'].aggregate()\n"
    program = before + after + PROGRAM.format(models=["a"])
    assert said(packages, program, SLACKWATER_JOB="") == ["begun", "wrapped a", "hooked a"]
