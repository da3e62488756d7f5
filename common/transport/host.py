"""Identify this host, so that a socket's path is tried only where it means something.

The kernel's boot id tells one running kernel from another. Containers of one kernel share it:
there the path itself decides, it exists or it does not.
"""

from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_identity() -> str:
    """Raises OSError where the kernel does not say."""
    return _BOOT_ID.read_text(encoding="ascii").strip()


def split_identity(address: str) -> tuple[str, str]:
    """(host, path) of `host!path`; the host is empty where the address is a bare path."""
    host, mark, path = address.partition("!")
    return (host, path) if mark and "/" not in host else ("", address)
