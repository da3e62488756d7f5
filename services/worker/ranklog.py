"""The log of a rank: what its processes print, in two files that together stay within a bound.

The processes print into a pipe. A few lines of /bin/sh read it, in a session of their own: neither
the end of this service nor a signal to the rank's group ends them, and they end by themselves once
nobody is left who could print. They append to `rank<k>.log`; with nearly half the bound in it, it
becomes `rank<k>.log-<start>`, where `start` is its first byte's place in all that was printed, and
the one before it is removed. So a byte keeps its place for ever, whatever was removed, and a reader
who knows the place of his next byte neither loses nor repeats one. Where the disk is full, what is
printed is read and dropped: the program does not hear of it.
"""

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from slackwater.common.base import limits

_LOGGER: Final = """\
trap '' TERM INT HUP
LC_ALL=C
export LC_ALL
command -v dd >/dev/null || exec cat >> "$0log"
start=$2 size=$3
keep() { said=$(dd bs=64k count=32 2>&1 >> "$0log"); }
drop() { said=$(dd bs=64k count=32 2>&1 > /dev/null); }
while :; do
  keep
  case $said in
  "0+0 records in"*) exit ;;
  *"records out"*) ;;
  *) drop
     case $said in "0+0 records in"*) exit ;; esac
     said="records out 0 bytes" ;;
  esac
  written=${said##*records out}
  size=$((size + ${written%% byte*}))
  if [ "$size" -ge "$1" ] && mv "$0log" "$0log-$start"; then
    for old in "$0log-"*; do [ "$old" = "$0log-$start" ] || rm -f "$old"; done
    start=$((start + size)) size=0
  fi
done
"""
"""$0: the files' common prefix; $1: bytes that end a part; $2: the place of the first byte of
`log`, $3: its size. dd copies each read at once; it ends after 32, or when nobody is left who
prints."""
_OVERRUN_BYTES: Final = 32 * 64 * 1024
"""Bytes that one dd may write; a part ends this much below half the bound."""
_LOOKS: Final = 10
"""Attempts to read, since a rotation may come in between; many fit between two rotations."""
_SCAN_BYTES: Final = 64 * 1024
_CONTROLS: Final = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z^_])|[\x00-\x08\x0b-\x1f\x7f]"
)
"""Matches codes that move a terminal's cursor or colour its text."""


@dataclass(frozen=True, slots=True)
class Piece:
    """`start` is the place of its first byte in all that was printed, and above the one asked for
    where that was removed already; `begin` and `end` are of what is kept."""

    start: int
    data: bytes
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class _Part:
    start: int
    size: int
    path: Path

    @property
    def end(self) -> int:
        return self.start + self.size


class RankLog:
    """The log of which `path` is the newest part."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def open_logger(self, bytes_max: int, stdin: int) -> subprocess.Popen[bytes]:
        """Start to log what comes through the pipe `stdin`. Raises OSError."""
        parts = self._parts() or [_Part(0, 0, self._path)]
        prefix = str(self._path).removesuffix("log")
        part = bytes_max // 2 - _OVERRUN_BYTES
        found = parts[-1].path == self._path
        last = (parts[-1].start, parts[-1].size) if found else (parts[-1].end, 0)
        return subprocess.Popen(
            ["/bin/sh", "-c", _LOGGER, prefix, str(part), *map(str, last)],
            stdin=stdin,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={"PATH": os.environ.get("PATH", os.defpath)},
            start_new_session=True,
            umask=0o077,
        )

    def read(self, offset: int, bytes_max: int) -> Piece:
        """Read at most so many bytes from `offset` on, or from the first that is kept."""
        for _ in range(_LOOKS):
            starts, parts = self._starts(), self._parts()
            begin, end = (parts[0].start, parts[-1].end) if parts else (0, 0)
            place = max(offset, begin)
            part = next((each for each in parts if each.start <= place < each.end), None)
            if part is None:
                return Piece(place, b"", begin, end)
            try:
                with part.path.open("rb") as file:
                    file.seek(place - part.start)
                    data = file.read(min(bytes_max, part.end - place))
            except FileNotFoundError:
                continue
            if self._starts() == starts:  # Else it is another file by now.
                return Piece(place, data, begin, end)
        return Piece(offset, b"", offset, offset + 1)  # There may be more; not at this moment.

    def newest(self) -> tuple[int, int]:
        """Return a value that changes with every byte that is printed."""
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return 0, 0
        return found.st_ino, found.st_size

    def end(self) -> int:
        """Return the place of the byte that will be printed next."""
        return self.read(0, 0).end

    def tail(self, lines: int) -> int:
        """Find the place where the last `lines` lines begin."""
        whole = self.read(0, 0)
        place, missing = whole.end, lines
        while missing and place > whole.begin:
            from_place = max(whole.begin, place - _SCAN_BYTES)
            data = self._between(from_place, place)
            at = len(data)
            if place == whole.end and data.endswith(b"\n"):
                at -= 1  # It ends the last line, and begins none.
            while missing and (at := data.rfind(b"\n", 0, at)) >= 0:
                missing -= 1
                if not missing:
                    return from_place + at + 1
            place = from_place
        return place

    def last_line(self) -> str:
        """Return the last line that says something, cut to LOG_LINE_CHARS."""
        end = self.end()
        text = self._between(max(0, end - limits.LOG_TAIL_BYTES), end).decode(errors="replace")
        said = (_readable(line) for line in reversed(text.split("\n")))
        return next(filter(None, said), "")[: limits.LOG_LINE_CHARS]

    def _between(self, place: int, end: int) -> bytes:
        found = b""
        while place < end and (piece := self.read(place, end - place)).data:
            found += piece.data
            place = piece.start + len(piece.data)
        return found

    def _parts(self) -> list[_Part]:
        """List the parts, the oldest first. The newest may not be there."""
        for _ in range(_LOOKS):
            starts, found = self._starts(), []
            try:
                for start in starts:
                    path = self._path.with_name(f"{self._path.name}-{start}")
                    found.append(_Part(start, path.stat().st_size, path))
                if self._path.exists():
                    after = found[-1].end if found else 0
                    found.append(_Part(after, self._path.stat().st_size, self._path))
            except FileNotFoundError:
                continue
            if self._starts() == starts:  # Each rotation makes a new name.
                return found
        return []

    def _starts(self) -> list[int]:
        name = self._path.name + "-"
        if not self._path.parent.exists():
            return []
        return sorted(
            int(entry.name.removeprefix(name))
            for entry in os.scandir(self._path.parent)
            if entry.name.startswith(name) and entry.name.removeprefix(name).isdecimal()
        )


def _readable(line: str) -> str:
    """Return what a person sees of a line in the end: a progress bar is drawn over itself."""
    return _CONTROLS.sub("", line.strip().rpartition("\r")[2]).strip()
