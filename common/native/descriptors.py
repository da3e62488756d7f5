"""Descriptors of a process that has many regions or channels."""

import resource


def allow_all() -> None:
    """Allow as many descriptors as the user may have: the soft limit is a default for programs that
    use `select`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
