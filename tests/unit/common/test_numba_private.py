"""The private parts of numba that common/native/compiled.py replaces or calls are those that it
knows."""

import inspect
import re
import tomllib
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from numba.core import caching
from numba.core.options import DefaultOptions
from numba.core.runtime.nrt import rtsys
from packaging.requirements import Requirement
from packaging.version import Version

from slackwater.common.base.errors import ConfigRejected
from slackwater.common.native.compiled import PATCHED, check_version, kernel

ROOT = Path(__file__).resolve().parents[3]

SIGNATURES: dict[Any, str] = {
    caching.CacheImpl.__init__: "(self, py_func)",
    caching.Cache.load_overload: "(self, sig, target_context)",
    caching.Cache._load_overload: "(self, sig, target_context)",
    caching.Cache._guard_against_spurious_io_errors: "(self)",
    caching.UserProvidedCacheLocator.from_function: "(py_func, py_file)",
    caching.InTreeCacheLocator.from_function: "(py_func, py_file)",
    caching.UserWideCacheLocator.from_function: "(py_func, py_file)",
    caching.InTreeCacheLocator.get_source_stamp: "(self)",
    type(rtsys).initialize: "(self, ctx)",
}


def requirement() -> Requirement:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (found,) = [
        required
        for required in map(Requirement, project["dependencies"])
        if required.name == "numba"
    ]
    return found


def test_the_range_that_is_asked_for_is_the_one_that_was_read() -> None:
    low, high = (".".join(map(str, version)) for version in PATCHED)
    assert {str(each) for each in requirement().specifier} == {f">={low}", f"<{high}"}


def test_the_version_that_is_installed_and_the_one_that_is_pinned_are_in_it() -> None:
    pinned = re.search(r"^numba==(\S+)", (ROOT / "requirements.lock").read_text(), re.M)
    assert pinned is not None
    for version in (pinned[1], numba.__version__):
        assert requirement().specifier.contains(version), version
        check_version(version)


@pytest.mark.parametrize("version", ["0.61.0", "0.67.9", "0.69.0", "0.69.0rc1", "1.0.0"])
def test_another_version_is_refused_with_the_remedy(version: str) -> None:
    with pytest.raises(ConfigRejected, match=r"numba .* is installed.* pip install 'numba>=0"):
        check_version(version)


def test_later_releases_of_a_known_version_are_taken() -> None:
    check_version(f"{PATCHED[0][0]}.{PATCHED[0][1]}.99")
    assert Version(numba.__version__) >= Version(".".join(map(str, PATCHED[0])))


@pytest.mark.parametrize("part", SIGNATURES, ids=lambda part: part.__qualname__)
def test_a_private_part_takes_what_it_took(part: Any) -> None:
    original = inspect.unwrap(part)
    names = list(inspect.signature(original).parameters)
    wanted = [name.strip() for name in SIGNATURES[part].strip("()").split(",")]
    # Two of them are ours by now, with names of our own.
    assert len(names) == len(wanted)
    if original.__module__.startswith("numba"):
        assert names == wanted


def test_what_is_read_of_a_cache_and_of_its_locators_exists() -> None:
    names = {each.__name__ for each in caching.CacheImpl._locator_classes}
    assert {"UserProvidedCacheLocator", "InTreeCacheLocator", "UserWideCacheLocator"} <= names
    assert isinstance(inspect.getattr_static(caching.CacheImpl, "locator"), property)
    assert "self._impl" in inspect.getsource(caching.Cache.__init__)
    assert "self._py_file" in inspect.getsource(caching.InTreeCacheLocator.__init__)


def test_borrowed_arrays_are_not_counted() -> None:
    """The option `_nrt` is private, too."""
    assert hasattr(DefaultOptions, "_nrt")

    def first(array: Any) -> Any:
        kept = array[1:]
        return kept[0]

    array = np.arange(3.0)
    compiled = kernel()(first)
    assert compiled(array) == 1.0
    (code,) = compiled.inspect_llvm().values()
    assert "NRT_incref" not in code
    assert "NRT_decref" not in code
