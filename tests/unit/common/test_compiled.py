"""The cache of compiled code knows what was compiled in."""

import os
import pickle  # noqa: TID251  # As numba keeps it.
import subprocess
import sys
from pathlib import Path

import pytest
from numba.core.caching import CacheImpl

from slackwater.common.base.errors import ConfigRejected
from slackwater.common.domains.models import fitting
from slackwater.common.native import compiled
from slackwater.common.native.compiled import PACKAGE, digest_of_imports


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "slackwater"
    (root / "common").mkdir(parents=True)
    (root / "kernel.py").write_text(
        "from numpy import zeros\n\nfrom slackwater.common import layout as l\n"
        "from slackwater.common.bounds import (\n    MOST,\n)\n"
    )
    (root / "common/layout.py").write_text("import slackwater.common.words\n\nWIDTH = 8\n")
    for name in ("words", "bounds", "other"):
        (root / f"common/{name}.py").write_text("X = 1\n")
    return root


@pytest.mark.parametrize("name", ["kernel", "common/layout", "common/words", "common/bounds"])
def test_what_is_imported_outdates_it_however_far(tree: Path, name: str) -> None:
    before = digest_of_imports(tree / "kernel.py")
    file = tree / f"{name}.py"
    file.write_text(file.read_text() + "Y = 2\n")
    compiled._read.cache_clear()
    assert digest_of_imports(tree / "kernel.py") != before


def test_what_is_not_imported_does_not(tree: Path) -> None:
    before = digest_of_imports(tree / "kernel.py")
    (tree / "common/other.py").write_text("X = 2\n")
    compiled._read.cache_clear()
    assert digest_of_imports(tree / "kernel.py") == before


def test_our_kernels_are_kept_so() -> None:
    [kept] = {
        type(value._cache._impl.locator)
        for value in vars(fitting).values()
        if hasattr(value, "_cache")
    }
    assert issubclass(kept, compiled._OfOurs)


def test_all_of_ours_use_it() -> None:
    plain = [
        path
        for folder in ("common", "services", "loadgen", "agent", "memory", "torch")
        for path in (PACKAGE / folder).rglob("*.py")
        if "from numba import njit" in path.read_text() and path.name != "compiled.py"
    ]
    assert plain == []


def test_whoever_must_compile_may_say_so_first_and_once(tmp_path: Path) -> None:
    """Regression: the first export of an installation was silent for a minute."""
    program = (
        "import numpy as np; from slackwater.common.native.compiled import on_compiling\n"
        "from slackwater.memory.resilience import fragments\n"
        "on_compiling(lambda: print('compiling'))\n"
        "slot = np.zeros(528, np.uint8); print('asked')\n"
        "fragments.first_word(slot); fragments._crc(slot, 8)"
    )
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    for said in ("asked\ncompiling\n", "asked\n"):
        told = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, env=environment
        )
        assert told.stdout == said, told.stderr


def test_a_cache_of_types_whose_module_moved_is_made_anew(tmp_path: Path) -> None:
    """Regression: after an upgrade that moved a module, each start ended with ModuleNotFoundError,
    as numba unpickles a function's index before it looks whether it is outdated."""
    program = (
        "import numpy as np; from slackwater.memory.resilience import fragments\n"
        "print(fragments.first_word(np.zeros(528, np.uint8)))"
    )
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", program]
    first = subprocess.run(command, capture_output=True, text=True, env=environment)
    [index] = tmp_path.rglob("*first_word*.nbi")
    with index.open("rb") as file:
        version = pickle.load(file)
    gone = b"cslackwater.memory.gone\nPage\n."  # The pickle of a class by its name.
    index.write_bytes(pickle.dumps(version) + gone)
    again = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (again.stdout, again.stderr) == (first.stdout, "")


def test_nowhere_to_keep_it_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: under a user without a home, of a read-only installation, a traceback."""
    monkeypatch.setattr(CacheImpl, "_locator_classes", [])
    with pytest.raises(ConfigRejected, match="set NUMBA_CACHE_DIR to a folder that may be written"):
        compiled.njit(cache=True)(lambda x: x)


def test_what_is_kept_is_loaded_without_all_of_numba() -> None:
    """It would import scipy's linear algebra, too: ten times what a kernel takes to load."""
    program = (
        "import sys; from slackwater.common.domains.slots.kernels import warm\n"
        "warm('sgd', 'float32', 2)\n"
        "print('numba.np.arraymath' in sys.modules, 'scipy.linalg' in sys.modules)"
    )
    for _ in range(2):  # The first may have to compile it.
        told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert told.stdout == "False False\n", told.stderr
