"""Let every Python of a rank write its stacks when it is asked, and let aggregators add up the
gradients of its DistributedDataParallel models: read by the interpreter as it starts, since this
folder is the first of the rank's PYTHONPATH.

It stands alone: the interpreter may be any, and know nothing of this package. The signal is handled
in C, also while the program waits in a collective. A program that does not import torch costs one
look at each import.
"""

import atexit
import contextlib
import faulthandler
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any

MODELS = "torch.nn.parallel.distributed"
GROUPS = "torch.distributed.distributed_c10d"


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


# Gradients ----------------------------------------------------------------------------------------


def aggregate() -> None:
    """Patch the two modules once they are imported, or at once where they are. A warm process calls
    it in each child that it forks."""
    if not os.environ.get("SLACKWATER_JOB") or os.environ.get("SLACKWATER_AGGREGATE") == "off":
        return
    seen = Seen()
    for name, patch in ((MODELS, seen.models), (GROUPS, seen.groups)):
        if name in sys.modules:
            patch(sys.modules[name])
        else:
            sys.meta_path.insert(0, AfterImport(name, patch))


class AfterImport:
    """A finder that finds what the others do, and has it patched once it is imported."""

    def __init__(self, name: str, patch: Callable[[Any], None]) -> None:
        self.name, self.patch = name, patch

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def then_patch(module: ModuleType) -> None:
                execute(module)
                self.patch(module)

            spec.loader.exec_module = then_patch  # type: ignore[method-assign]
        return spec


class Seen:
    """Notes what the program does with torch.distributed."""

    def __init__(self) -> None:
        self.wrapped = False

    def models(self, module: Any) -> None:
        """Install the hook at the first model that is wrapped: torch is whole by then."""
        wrap = module.DistributedDataParallel.__init__

        def first(model: object, *arguments: Any, **options: Any) -> None:
            self.wrapped = True
            module.DistributedDataParallel.__init__ = wrap
            try:
                ddp = import_module("slackwater.torch.ddp")  # If the program's Python has it.
            except ImportError as error:
                say(f"plain DistributedDataParallel: this Python cannot import slackwater: {error}")
            else:
                ddp.install()
            module.DistributedDataParallel.__init__(model, *arguments, **options)

        module.DistributedDataParallel.__init__ = first

    def groups(self, module: Any) -> None:
        """Tell at the end of a program that has several ranks and no model for the hook."""
        begin = module.init_process_group

        def init_process_group(*arguments: Any, **options: Any) -> None:
            begin(*arguments, **options)
            if module.get_world_size() > 1 and module.get_rank() == 0:
                atexit.register(self.tell)

        exported: Any = sys.modules.get("torch.distributed")
        module.init_process_group = init_process_group
        if getattr(exported, "init_process_group", None) is begin:  # It is imported already.
            exported.init_process_group = init_process_group

    def tell(self) -> None:
        wrapper: Any = sys.modules.get("slackwater.torch.gradients")
        if not self.wrapped and not (wrapper and wrapper.GradientOptimizer.made):
            say(
                "the program wrapped no model in DistributedDataParallel: aggregators had no part "
                "in what its ranks exchanged"
            )


def say(text: str) -> None:
    sys.stderr.write(f"slackwater: {text}\n")


if __name__ == "sitecustomize":
    register()
    aggregate()
    the_interpreter_s_own()
