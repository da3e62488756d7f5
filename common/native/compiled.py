"""numba's njit, whose cache on disk is outdated by a change of any module that was imported, too.

numba keeps what it compiled until the function's own file changes. What it compiled in from other
files, constants of a record's layout among them, would stay as it was: after an upgrade a service
would run machine code that reads yesterday's layout. And what is in the cache is loaded at once.

For that, private parts of numba are replaced. They were read in the versions PATCHED, which is what
pyproject.toml asks for; another version is refused. To move on: compare the parts that
tests/unit/common/test_numba_private.py names, then change both.
"""

import hashlib
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final

import numba
from numba import njit
from numba.core.caching import (
    Cache,
    CacheImpl,
    InTreeCacheLocator,
    UserProvidedCacheLocator,
    UserWideCacheLocator,
)
from numba.core.runtime.nrt import rtsys

from slackwater.common.base.errors import ConfigRejected

__all__ = [
    "PATCHED",
    "check_version",
    "digest_of_imports",
    "inline_kernel",
    "kernel",
    "njit",
    "on_compiling",
]

PACKAGE: Final = Path(__file__).parents[2]
"""The folder of the package `slackwater`, from which everything of ours is imported."""
PATCHED: Final = ((0, 68), (0, 69))
"""From the first to before the second."""


def check_version(found: str) -> None:
    """Raises ConfigRejected for a numba whose private parts may be others."""
    first, end = PATCHED
    if not first <= tuple(map(int, re.findall(r"\d+", found)[:2])) < end:
        low, high = (".".join(map(str, version)) for version in PATCHED)
        raise ConfigRejected(
            f"numba {found} is installed, private parts of it are known from {low} to before "
            f"{high}: pip install 'numba>={low},<{high}'"
        )


check_version(numba.__version__)


def kernel(**options: Any) -> Any:
    """njit without the interpreter lock, for functions that make no arrays: whoever calls from
    Python keeps alive those that he passes. numba counts the references to each array of a record
    at every call otherwise, by atomic operations on words that all threads share."""
    bare: Any = njit  # Its own annotation does not know all its options.
    return bare(nogil=True, _nrt=False, **options)


def inline_kernel(**options: Any) -> Any:
    """Compile like `kernel`, but inline: for code that runs for each page. A call that stays a call
    hands over every array of the records by value, on the stack."""
    return kernel(forceinline=True, **options)


_IMPORT = re.compile(rb"^(?:from|import) slackwater\.?([\w.]*)(?: import (\([^)]*\)|.*))?", re.M)


@cache
def _read(path: Path) -> tuple[bytes, tuple[Path, ...]]:
    """Return a module's digest, and the files of ours that it may import."""
    text = path.read_bytes()
    package = path
    while package.name != "slackwater":
        package = package.parent
    found: list[Path] = []
    for module, names in _IMPORT.findall(text):
        base = package.joinpath(*module.decode().split(".")) if module else package
        inside = [base / name.decode() for name in re.findall(rb"\w+", names)]
        found += [p.with_suffix(".py") for p in (base, *inside)]
    return hashlib.sha256(text).digest(), tuple(p for p in found if p.is_file())


def digest_of_imports(path: Path) -> str:
    """Return the digest of a file below a folder `slackwater` and of all that it imports from
    there, by whatever way."""
    seen: dict[Path, bytes] = {}
    left = [path]
    while left:
        at = left.pop()
        if at not in seen:
            seen[at], imports = _read(at)
            left += imports
    return hashlib.sha256(b"".join(seen[at] for at in sorted(seen))).hexdigest()


class _OfOurs:
    """A locator of numba's for our own files; it leaves those of others alone."""

    _py_file: str

    def get_source_stamp(self) -> str:
        return digest_of_imports(Path(self._py_file))

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> Any:
        ours = Path(py_file).is_relative_to(PACKAGE)
        return super().from_function(py_func, py_file) if ours else None  # type: ignore[misc]


class _Provided(_OfOurs, UserProvidedCacheLocator):
    pass


class _InTree(_OfOurs, InTreeCacheLocator):
    pass


class _UserWide(_OfOurs, UserWideCacheLocator):
    pass


CacheImpl._locator_classes[:0] = [_Provided, _InTree, _UserWide]


_make: Callable[[CacheImpl, Any], None] = CacheImpl.__init__


def _make_or_refuse(self: CacheImpl, py_func: Any) -> None:
    try:
        _make(self, py_func)
    except RuntimeError as error:
        raise ConfigRejected(
            f"no folder can keep compiled code ({error}); set NUMBA_CACHE_DIR to a folder "
            "that may be written"
        ) from error


CacheImpl.__init__ = _make_or_refuse  # type: ignore[method-assign]
_told: list[Callable[[], None]] = []


def on_compiling(say: Callable[[], None]) -> None:
    """`say` is called once, before the next function of ours that is not in the cache is compiled;
    by the thread that compiles it."""
    _told[:] = [say]


_load_any: Callable[[Cache, Any, Any], Any] = Cache.load_overload


def _load_ours(self: Cache, signature: Any, target: Any) -> Any:
    """Load compiled code without numba's own implementations. It needs none of them, and numba
    imports them (and scipy's linear algebra) before it looks into a cache: half a second of
    processor time and 30 MB of every aggregator's start. A compilation still begins with them."""
    if not isinstance(self._impl.locator, _OfOurs):
        return _load_any(self, signature, target)
    rtsys.initialize(target)
    with self._guard_against_spurious_io_errors():
        try:
            found = self._load_overload(signature, target)  # type: ignore[no-untyped-call]
        except (ImportError, AttributeError):  # Its types' modules moved: compiled by an older one.
            self.flush()  # type: ignore[no-untyped-call]
            found = None
        if found is not None:
            return found
    if _told:
        _told.pop()()
    return None


Cache.load_overload = _load_ours  # type: ignore[method-assign]
