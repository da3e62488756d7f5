"""Packs of virtual environments: packed on one machine, made to work at another place.

An environment is bound to its place by the first lines of the scripts in `bin`, and to its machine
by the interpreter that `bin/python` is a link to. The scripts are written anew where it is
unpacked. The interpreter is not sent: the other machine must have it at the same path, which is
looked up and never run, since a root service would run what somebody else named.
"""

import json
import os
import re
import sys
import urllib.parse
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from subprocess import DEVNULL, SubprocessError, run
from typing import Final

import structlog

from slackwater.common.base.errors import Rejected
from slackwater.common.store.packs import Kind, Pack, look, too_many

log = structlog.get_logger()
CONFIG: Final = "pyvenv.cfg"
_CONFIG_BYTES_MAX: Final = 64 * 1024
_SCRIPT_BYTES_MAX: Final = 1024**2
"""Larger files in `bin` are compiled programs."""
_INTERPRETER: Final = re.compile(r"python(\d+(\.\d+)?)?\Z")
_FIRST_LINES: Final = re.compile(
    rb"\A#!(?:(?!/usr/bin/env )[^\n]*/python[\d.]*(?:[ \t][^\n]*)?\n"
    rb"|/bin/sh\n'''exec' [^\n]*/python[\d.]*['\"]? \"\$0\" \"\$@\"\n' '''\n)"
)
"""The first lines of a script of the environment, as pip writes them for short paths and for long
ones."""
_LEFT_OUT: Final = re.compile(r"__pycache__\Z|.*\.py[co]\Z")
_ACTIVATES: Final = re.compile(r"(activate(\.\w+)?|Activate\.ps1)\Z")
"""Scripts for a shell at the place where the environment was made."""
_COMPILE_S: Final = 300.0
_READ_ONLY: Final = 0o555


def _leads_out(name: str, to: str) -> bool:
    """Allow the links to the interpreter alone."""
    path = PurePosixPath(name)
    names = _INTERPRETER.match(path.name) and _INTERPRETER.match(os.path.basename(to))
    return bool(names) and str(path.parent) == "bin" and os.path.isabs(to)


VENV: Final = Kind(
    "pack of a virtual environment", 8 * 1024**3, 100_000,
    "uninstall what the job does not need, or have the packages on the nodes", _leads_out,
)  # fmt: skip


class Venv:
    """A virtual environment's own words of itself. Raises Rejected, OSError."""

    def __init__(self, folder: Path) -> None:
        with (folder / CONFIG).open("rb") as file:
            text = file.read(_CONFIG_BYTES_MAX).decode(errors="replace")
        lines = (line.partition("=") for line in text.splitlines())
        found = {name.strip().lower(): value.strip() for name, _, value in lines}
        self.folder, self.home = folder, found.get("home", "")
        version = re.match(r"\d+\.\d+", found.get("version") or found.get("version_info", ""))
        if version is None or not os.path.isabs(self.home):
            raise Rejected(f"{folder / CONFIG} names no interpreter (`home`) with its `version`")
        self.version = version[0]
        self.shares = found.get("include-system-site-packages", "").lower() == "true"

    @property
    def interpreter(self) -> str:
        return os.path.realpath(self.folder / "bin" / "python")

    @property
    def packages(self) -> Path:
        return self.folder / "lib" / f"python{self.version}" / "site-packages"

    def lacks(self) -> str:
        """Say which interpreter is missing on this machine, by its files; empty: it is there."""
        found = self.interpreter
        wanted = f"Python {self.version} ({found})"
        if not os.path.isfile(found) or not os.access(found, os.X_OK):
            return f"{wanted}, which is not there"
        other = re.fullmatch(r"python(\d+\.\d+)", os.path.basename(found))
        if other is not None and other[1] != self.version:
            return f"{wanted}, which is another version"
        library = f"python{self.version}"
        for place in (self.home, os.path.dirname(found)):
            for above in (Path(place), *Path(place).parents):
                if any((above / lib / library / "os.py").is_file() for lib in ("lib", "lib64")):
                    return ""
        return f"{wanted}, whose library lib/{library} is not at {self.home}"

    def check(self) -> None:
        """Raise Rejected where this machine lacks its interpreter."""
        if lacking := self.lacks():
            raise Rejected(
                f"it needs {lacking}: install it there, or submit the job with a --venv whose "
                "interpreter its nodes have"
            )

    def warnings(self) -> Iterator[str]:
        """Say what of it the nodes will lack."""
        editable: dict[str, str] = {}
        for path in sorted(self.packages.glob("*.dist-info/direct_url.json")):
            with suppress(ValueError, AttributeError):  # Not as PEP 610 has it.
                told = json.loads(path.read_bytes())
                if told.get("dir_info", {}).get("editable"):
                    place = urllib.parse.unquote(urllib.parse.urlparse(told.get("url", "")).path)
                    editable[place] = path.parent.name.partition("-")[0]
        for path in sorted(self.packages.glob("*.pth")):
            for line in path.read_text(errors="replace").splitlines():
                place = line.strip()
                if os.path.isabs(place) and not Path(place).is_relative_to(self.folder.absolute()):
                    known = any(Path(place).is_relative_to(each) for each in editable)
                    editable |= {} if known else {place: path.name}
        for place, name in editable.items():
            yield (
                f"{name} is used from {place}, which is not sent: install it without "
                "`-e`, or have that folder on the nodes"
            )
        if self.shares:
            yield f"it uses packages of {self.home}, too (include-system-site-packages)"


def pack(folder: Path) -> Pack:
    """Pack the environment, without what was compiled and the scripts that activate it. Raises
    Rejected where it is none, or too large, or lacks its interpreter; OSError."""
    if not (folder / CONFIG).is_file():
        raise Rejected(f"{folder} is not a virtual environment: it has no {CONFIG}")
    if lacking := Venv(folder).lacks():
        raise Rejected(f"{folder} needs {lacking}: make it anew")
    return look(folder, _chosen(folder), VENV)


def _chosen(folder: Path) -> list[str]:
    found: list[str] = []
    for place, folders, files in os.walk(folder):
        below = os.path.relpath(place, folder)
        links = [name for name in folders if os.path.islink(os.path.join(place, name))]
        folders[:] = [name for name in folders if not _LEFT_OUT.match(name)]
        found += [
            os.path.normpath(os.path.join(below, name))
            for name in (*links, *files)
            if not _LEFT_OUT.match(name) and not (below == "bin" and _ACTIVATES.match(name))
        ]
        if len(found) > 10 * VENV.files_max:
            raise Rejected(too_many(folder, len(found), VENV))
    return found


# At its new place ---------------------------------------------------------------------------------


def settle(fresh: Path, target: Path) -> None:
    """Make an environment in `fresh` one that works in `target`, and that nobody may write to.
    Raises Rejected where this machine lacks its interpreter, OSError."""
    venv = Venv(fresh)
    venv.check()
    for path in sorted((fresh / "bin").iterdir()):
        if path.is_file() and not path.is_symlink() and path.stat().st_size <= _SCRIPT_BYTES_MAX:
            _start_with(path, target / "bin" / "python")
    if venv.version == f"{sys.version_info[0]}.{sys.version_info[1]}":
        _compile(fresh, target)
    for place, _, files in os.walk(fresh):
        os.chmod(place, _READ_ONLY)
        for name in files:
            path = Path(place, name)
            if not path.is_symlink():
                path.chmod(_READ_ONLY if path.stat().st_mode & 0o100 else 0o444)


def _start_with(script: Path, python: Path) -> None:
    """Let a script of the environment start with this interpreter. /bin/sh starts it, as the kernel
    cuts long paths, and splits those with spaces."""
    content = script.read_bytes()
    lines = f"#!/bin/sh\n'''exec' \"{python}\" \"$0\" \"$@\"\n' '''\n".encode()
    changed = _FIRST_LINES.sub(lambda _: lines, content)
    if changed != content:
        script.write_bytes(changed)


def _compile(fresh: Path, target: Path) -> None:
    """Compile its modules once, as nobody may write what an interpreter would compile each time. It
    is done by our own interpreter, without anything of the environment's."""
    python = (sys.executable, "-I", "-S", "-m", "compileall", "-q")
    words = (*python, "--invalidation-mode", "unchecked-hash", "-s", fresh, "-p", target)
    try:
        done = run((*words, "-j", "4", fresh / "lib"), stdout=DEVNULL, stderr=DEVNULL,
                   timeout=_COMPILE_S, check=False)  # fmt: skip
    except (OSError, SubprocessError) as error:
        log.warning("venv.not_compiled", venv=target.name, reason=str(error))
        return
    log.info("venv.compiled", venv=target.name, code=done.returncode)
