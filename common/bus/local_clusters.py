"""The clusters of this account on this machine, by name: a folder each, in its owner's sight alone.

    clusters/NAME/lock          held as long as its `slackwater up` lives
    clusters/NAME/cluster.json  what it is, for `slackwater status` (schemas/machine.py)
    clusters/NAME/url           its address, with its owner's secret
    clusters/NAME/users/USER    the same for each other user of its bus
    clusters/NAME/metrics.json  where its services serve their metrics, for Prometheus
    clusters/NAME/logs/         its services' logs, where it has no state folder

What an `up` that was killed left there is removed by whoever looks next.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Final

import msgspec

from slackwater.common.base.errors import DecodeRejected, Rejected, Unavailable
from slackwater.common.base.file_lock import FileLock
from slackwater.common.base.private_files import private_folder, write_private
from slackwater.common.bus.access import DEFAULT_CLUSTER, address_file, clusters_folder, shown
from slackwater.schemas.machine import LocalCluster

_TAKE_S: Final = 1.0
"""Seconds to try for a name's lock: a process that only looks whether the name is taken holds it
for an instant."""
_LOOK_S: Final = 0.02
_FILES: Final = ("url", "cluster.json", "metrics.json")


class Listed:
    """The entry of a cluster under its name, while its `up` holds it."""

    def __init__(self, entry: LocalCluster) -> None:
        self.entry = entry
        self._folder = clusters_folder() / entry.name

    def tell(self, **changes: object) -> None:
        """Change the entry; it is written only if that changes anything."""
        entry = msgspec.structs.replace(self.entry, **changes)
        if entry != self.entry or not self._entry.exists():
            self.entry = entry
            write_private(self._entry, msgspec.json.encode(entry).decode() + "\n")

    def let_in(self, user: str, url: str) -> None:
        """Keep the address for another user of the bus, to be handed over to them."""
        private_folder(self._folder / "users")
        write_private(self._folder / "users" / user, url + "\n")

    def reachable(self, url: str) -> None:
        """Let commands find the cluster from now on."""
        write_private(self._folder / "url", url + "\n")
        self.tell(url=shown(url))

    @property
    def _entry(self) -> Path:
        return self._folder / "cluster.json"


def default_log_dir(name: str) -> Path:
    return clusters_folder() / name / "logs"


def metrics_file(name: str) -> Path:
    return clusters_folder() / name / "metrics.json"


@contextmanager
def listed(entry: LocalCluster) -> Iterator[Listed]:
    """Hold the name, and list its cluster, for as long as the context lasts. Raises Rejected when
    the name is taken."""
    folder = clusters_folder() / entry.name
    private_folder(folder)
    holding = FileLock(folder / "lock")
    give_up_s = time.monotonic() + _TAKE_S
    while holding.take():
        known = _read(folder)
        if known is not None or time.monotonic() > give_up_s:
            raise Rejected(_taken(entry.name, known))
        time.sleep(_LOOK_S)
    try:
        _remove(folder)
        found = Listed(entry)
        found.tell()
        yield found
    finally:
        _remove(folder)
        holding.release()


def known() -> list[LocalCluster]:
    """List the clusters whose `up` process is alive, by name."""
    folders = sorted(clusters_folder().glob("*/lock"))
    return [entry for lock in folders if (entry := living(lock.parent.name)) is not None]


def living(name: str) -> LocalCluster | None:
    """Return the cluster of that name if its `up` is alive; remove what a killed one left."""
    folder = clusters_folder() / name
    if not (folder / "lock").is_file():
        return None
    holding = FileLock(folder / "lock")
    if holding.take():
        return _read(folder)
    try:
        _remove(folder)
    finally:
        holding.release()
    return None


def selected(name: str) -> LocalCluster | None:
    """Return the cluster of that name; without a name the only one there is, or `default`; None:
    there is none at all. Raises Rejected where a choice is needed, or none has that name."""
    entries = {entry.name: entry for entry in known()}
    if not name and not entries:
        return None
    if not name and len(entries) > 1 and DEFAULT_CLUSTER not in entries:
        raise Rejected(
            f"{len(entries)} clusters run here: {', '.join(entries)}; choose one by its name "
            "(--cluster, or SLACKWATER_CLUSTER)"
        )
    if name and name not in entries:
        those = f"those that run: {', '.join(entries)}" if entries else "none runs"
        raise Rejected(
            f"no cluster {name!r} runs here; {those}; `slackwater up --name {name}` starts it"
        )
    return entries[name or (DEFAULT_CLUSTER if len(entries) > 1 else next(iter(entries)))]


def chosen(name: str) -> str:
    """Return the address, with the token, of the cluster that `selected` finds; empty: there is
    none. Raises Rejected, and Unavailable while it has no address."""
    entry = selected(name)
    if entry is None:
        return ""
    try:
        return address_file(entry.name).read_text().strip()
    except FileNotFoundError:
        raise Unavailable(f"cluster {entry.name} is {entry.state}: try again") from None


def carrying(url: str) -> str:
    """Return `url` with the token if it is the address of one of these clusters."""
    for entry in known():
        if entry.url and entry.url == url.rstrip("/"):
            return address_file(entry.name).read_text().strip()
    return url


def _taken(name: str, entry: LocalCluster | None) -> str:
    who = ""
    if entry is not None:
        since = datetime.fromtimestamp(entry.started_s).astimezone()
        who = f": process {entry.pid}, since {since:%Y-%m-%d %H:%M:%S}"
    return (
        f"cluster {name} runs already{who}; end it with `slackwater down --name {name}`, or start "
        "another with `slackwater up --name OTHER`"
    )


def _read(folder: Path) -> LocalCluster | None:
    try:
        return msgspec.json.decode((folder / "cluster.json").read_bytes(), type=LocalCluster)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise DecodeRejected(f"{folder}/cluster.json: {error}; remove it") from error


def _remove(folder: Path) -> None:
    for path in (*(folder / name for name in _FILES), *(folder / "users").glob("*")):
        path.unlink(missing_ok=True)
