"""Let every Python of a rank write its stacks when it is asked: read by the interpreter as it
starts, since this folder is the first of the rank's PYTHONPATH.

It stands alone: the interpreter may be any, and know nothing of this package. The signal is handled
in C, also while the program waits in a collective.
"""

import contextlib
import faulthandler
import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec


def register() -> None:
    """Dump all threads' stacks into the file named in the environment, at the signal named there.
    A warm process calls it in each child that it forks."""
    path, _, number = os.environ.get("SLACKWATER_STACKS", "").rpartition(":")
    if path and number.isdecimal():
        with contextlib.suppress(OSError):  # The program goes on without.
            file = open(path, "ab")  # noqa: SIM115
            faulthandler.register(int(number), file=file, all_threads=True, chain=False)


def the_interpreter_s_own() -> None:
    """Run the module of this name that would have been found without this one."""
    here = os.path.dirname(os.path.abspath(__file__))
    others = [folder for folder in sys.path if os.path.abspath(folder) != here]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


if __name__ == "sitecustomize":
    register()
    the_interpreter_s_own()
