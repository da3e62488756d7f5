"""Where a socket's path means something: on this host, and in which of its file systems.

The kernel's boot id tells one running kernel from another. Containers of one kernel share it, and
may have other files at the same path: the folder's device and inode tell these apart. They stay the
same while the process that listens there restarts.
"""

import os
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_identity() -> str:
    """Raises OSError where the kernel does not say."""
    return _BOOT_ID.read_text(encoding="ascii").strip()


def identified(path: str, host: str) -> str:
    """Return the address of a socket, `host@folder!path`. Raises OSError."""
    return f"{host}@{_folder(path)}!{path}"


def split_identity(address: str) -> tuple[str, str]:
    """(host, path) of an address; the host is empty where the address is a bare path."""
    host, mark, path = address.partition("!")
    return (host.partition("@")[0], path) if mark and "/" not in host else ("", address)


def elsewhere(address: str, here: str) -> str:
    """Say why the path of this address is not that socket here; empty: it is, as soon as its
    process listens. Addresses of version 0.3.0 and before name no folder."""
    host, path = split_identity(address)
    if host and host != here:
        return f"{path} is on another host"
    folder = address.partition("!")[0].partition("@")[2] if host else ""
    if folder:
        try:
            found = _folder(path)
        except OSError as error:
            return f"{path}: {error.strerror}"
        if found != folder:
            return f"{path} is in another container of this host"
    return ""


def _folder(path: str) -> str:
    about = os.stat(Path(path).parent)
    return f"{about.st_dev:x}.{about.st_ino:x}"
