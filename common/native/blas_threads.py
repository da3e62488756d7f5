"""How many threads linear algebra may have in a process: one, where many small models are fitted.

A fit solves tiny systems; a library that shares each out to all cores spends them on waiting for
one another. The libraries read these variables when they are loaded, so they belong to the start of
a process: the supervisor gives them to services, `loadgen` takes them first of all. A worker
service gets none: its environment is that of the jobs, whose programs decide for themselves.
"""

from collections.abc import Mapping
from typing import Final

VARIABLES: Final = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


def one_each(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to add to the environment of a new process; those that are set there
    stand."""
    return {name: "1" for name in VARIABLES if name not in environment}
