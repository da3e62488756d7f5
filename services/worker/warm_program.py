"""The warm process: it has imported what training programs import, and forks ranks.

It is a program of its own (`python -m slackwater.services.worker.warm_program`), needs the standard
library alone beside the modules that it is told to import, and has one thread, so that a fork of it
is whole. It never touches CUDA. It ends when its service's end of the socket is closed.

A request becomes two processes: a leader, which does what the lines of /bin/sh in processes.py do
for a cold start, and its child, which becomes the program as `python FILE ...` would have. What the
interpreter and the libraries read from the environment when they start or are imported is the warm
process's own; warm.py sends no request that asks for another value.
"""

import atexit
import builtins
import contextlib
import ctypes
import fcntl
import gc
import importlib
import io
import json
import multiprocessing.process
import os
import signal
import site
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any, Final

REQUEST_BYTES_MAX: Final = 128 * 1024
DESCRIPTORS_MAX: Final = 200
CODE_TWICE: Final = 75
"""The leader's exit code where the attempt was started already; as /bin/sh's in processes.py."""
_NO_NEW_PRIVS: Final = 38  # PR_SET_NO_NEW_PRIVS of linux/prctl.h.
_DUMPABLE: Final = 4  # PR_SET_DUMPABLE.
_STOPS: Final = (signal.SIGTERM, signal.SIGINT)
Request = dict[str, Any]


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    del sys.path[0]  # The working folder of this process: a program has its own there.
    packages = _packages()
    for name in sys.argv[2].split(","):
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    if not os.fork():  # Before a fork, numpy's linear algebra ends the threads it has begun.
        os._exit(0)
    if reason := _unfit():
        raise SystemExit(reason)
    gc.collect()
    gc.freeze()
    imported = {name.partition(".")[0] for name in sys.modules} - {"__main__"}
    control.send(b"{}")
    while True:
        payload, descriptors, _, _ = socket.recv_fds(control, REQUEST_BYTES_MAX, DESCRIPTORS_MAX)
        if not payload:
            os._exit(0)  # Its service has ended. Nothing is worth taking torch apart for seconds.
        request: Request = json.loads(payload)
        if _packages() != packages:
            _answer(control, {"stale": "packages were installed or removed"})
            os._exit(0)
        if clash := _clash(request["argv"][0], request["folder"], imported):
            _answer(control, {"cold": f"{clash} next to the program is named as an import"})
        elif not os.fork():
            _lead(request, descriptors, control)
        for descriptor in descriptors:
            os.close(descriptor)


def _packages() -> dict[str, int]:
    """Return when something was last installed or removed, for each folder of packages."""
    folders = [*site.getsitepackages(), site.getusersitepackages()]
    return {folder: os.stat(folder).st_mtime_ns for folder in folders if os.path.isdir(folder)}


def _unfit() -> str:
    """Say why this process must not be forked; empty: nothing speaks against it."""
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        return f"an import began {threads - 1} threads, which its forks would lack"
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("/dev/nvidia"):
                return "an import opened the GPU, which its forks could not use then"
    return ""


def _clash(script: str, folder: str, imported: set[str]) -> str:
    """Find what lies beside the script and would have been imported in place of what was."""
    beside = os.path.dirname(os.path.join(folder, script))
    with contextlib.suppress(OSError):
        for name in os.listdir(beside):
            stem, _, suffix = name.partition(".")
            if stem not in imported:
                continue
            if suffix in ("py", "so") or (not suffix and os.path.isdir(f"{beside}/{name}")):
                return name
    return ""


def _answer(control: socket.socket, answer: dict[str, object]) -> None:
    with contextlib.suppress(OSError):  # Its service was killed: the next one finds the rank.
        control.send(json.dumps(answer).encode())


# The leader ---------------------------------------------------------------------------------------


def _lead(request: Request, descriptors: list[int], control: socket.socket) -> None:
    """Do as the lines of /bin/sh in processes.py do. Does not return."""
    code = 1
    try:
        code = _leader(request, descriptors, control)
    except BaseException as error:  # It must not go on as a second warm process.
        _answer(control, {"cold": f"{type(error).__name__}: {error}"})
    finally:
        os._exit(code)


def _leader(request: Request, descriptors: list[int], control: socket.socket) -> int:
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _mark(request["mark"])
    _enter(request)
    control = _give(control, descriptors, request["numbers"])
    if request["account"] is None:
        os.chdir(request["folder"])
    stopped: list[int] = []
    for number in _STOPS:
        signal.signal(number, lambda *_: stopped.append(1))
    prefix = request["prefix"]
    try:
        lock = os.open(f"{prefix}process", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        _answer(control, {"leader": os.getpid()})  # Another one runs: it is found by that file.
        return CODE_TWICE
    with open("/proc/sys/kernel/random/boot_id", "rb") as boot, open("/proc/self/stat", "rb") as me:
        os.write(lock, boot.read() + me.read())
    os.close(lock)
    code = 143 if stopped else _run(request, stopped, control)
    try:
        with open(f"{prefix}exit.new", "w") as file:
            file.write(f"{code}\n")
        os.rename(f"{prefix}exit.new", f"{prefix}exit")
    except OSError:
        os.close(os.open(f"{prefix}exit-{code}", os.O_WRONLY | os.O_CREAT, 0o666))
    return code


def _give(control: socket.socket, given: list[int], numbers: list[int]) -> socket.socket:
    """Let the process print into the first descriptor, and have the others by the numbers that its
    environment names. Return `control`, which has another number now."""
    above = max(numbers, default=2) + 1
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, above) for descriptor in given]
    moved_control = fcntl.fcntl(control, fcntl.F_DUPFD_CLOEXEC, above)
    control.close()
    for descriptor in given:
        os.close(descriptor)
    for descriptor, number in zip(moved, (1, *numbers), strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.dup2(1, 2)
    return socket.socket(fileno=moved_control)


def _enter(request: Request) -> None:
    """Let the kernel end this process first for want of memory, and enter its cgroup."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(str(request["oom_score"]))
    if request["cgroup"]:
        with contextlib.suppress(OSError), open(f"{request['cgroup']}/cgroup.procs", "w") as file:
            file.write("0")


def _mark(mark: str) -> None:
    """Write over the mark in the memory that /proc shows as this process's first environment: by it
    containment.py finds the process where there are no cgroups."""
    with open("/proc/self/environ", "rb") as file:
        first = file.read()
    name, _, value = mark.encode().partition(b"=")
    at = (b"\0" + first).index(b"\0" + name + b"=")
    end = first.index(b"\0", at)
    written = (name + b"=" + value).ljust(end - at, b"\0")
    if len(written) > end - at:
        raise ValueError(f"the mark {mark} has {len(mark)} letters, over {end - at}")
    with open("/proc/self/stat", "rb") as file:
        start = int(file.read().rpartition(b")")[2].split()[47])
    ctypes.memmove(start + at, written, len(written))


def _run(request: Request, stopped: list[int], control: socket.socket) -> int:
    """Fork the program, and return its exit code as a shell tells it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
    child = os.fork()
    if not child:
        control.close()
        _become(request)
    early = signal.sigpending() & set(_STOPS)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
    if early or stopped:  # It came before the child was there to get it.
        os.kill(child, signal.SIGTERM)
    _answer(control, {"leader": os.getpid()})
    control.close()
    status = os.waitpid(child, 0)[1]
    if not os.WIFSIGNALED(status):
        return os.waitstatus_to_exitcode(status)
    number = os.WTERMSIG(status)
    if number not in (signal.SIGINT, signal.SIGPIPE):  # A shell says this, too.
        dumped = " (core dumped)" if os.WCOREDUMP(status) else ""
        os.write(2, f"{signal.strsignal(number)}{dumped}\n".encode())
    return 128 + number


# The program --------------------------------------------------------------------------------------


def _become(request: Request) -> None:
    """Run the program as `python FILE ...` would. Does not return."""
    for number in _STOPS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
    try:
        if (account := request["account"]) is not None:
            drop_privileges(*account)
            os.chdir(request["folder"])  # Only now: others' folders are not to be entered.
        _fresh(request)
        before = frozenset(sys.modules)
        _end(_play(request["argv"][0]), before)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def drop_privileges(uid: int, gid: int, groups: list[int]) -> None:
    """Become another account for good. Raises OSError."""
    os.setgroups(groups)
    os.setgid(gid)
    os.setuid(uid)
    # The kernel has closed its /proc to its own children, who look for the ticket there. Nothing
    # in its memory is secret: it was started without a credential.
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0) or library.prctl(_DUMPABLE, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "no_new_privs")


def _fresh(request: Request) -> None:
    """Make this process what a fresh interpreter would be."""
    folder, environment = os.getcwd(), dict(request["environment"])
    if "PWD" in environment and not _same(environment["PWD"], folder):
        environment["PWD"] = folder  # A shell does so, too.
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    for name in ("register", "aggregate"):  # See common/native/rank_start.
        function = getattr(sys.modules.get("sitecustomize"), name, None)
        if function is not None:
            function()
    argv = request["argv"]
    sys.argv, sys.orig_argv = argv, [sys.executable, *argv]
    if not sys.flags.safe_path:
        sys.path.insert(0, os.path.dirname(os.path.realpath(argv[0])))
    tempfile.tempdir = None
    vars(multiprocessing.process)["ORIGINAL_DIR"] = folder
    multiprocessing.process.current_process().authkey = os.urandom(32)
    if "numpy" in sys.modules:  # `random` seeds itself anew in a fork.
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()


def _same(one: str, other: str) -> bool:
    try:
        return os.path.isabs(one) and os.path.samefile(one, other)
    except OSError:
        return False


def _play(script: str) -> BaseException | None:
    """Run the script as __main__; return what ended it, told already; None: its end."""
    path = os.path.join(os.getcwd(), script)
    module = ModuleType("__main__")
    module.__dict__.update(
        __annotations__={},
        __file__=path,
        __builtins__=builtins,
        __cached__=None,
        __loader__=SourceFileLoader("__main__", path),
    )
    sys.modules["__main__"] = module
    try:
        with io.open_code(path) as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
        exec(code, module.__dict__)  # noqa: S102  It is what `python FILE` does.
    except SystemExit as error:
        return error
    except BaseException as error:
        trace = error.__traceback__
        error.__traceback__ = trace.tb_next if trace is not None else None
        sys.excepthook(type(error), error, error.__traceback__)
        return error
    return None


def _end(error: BaseException | None, before: frozenset[str]) -> None:
    """End as an interpreter does, but for what was imported before: nobody waits for that to be
    taken apart. Does not return."""
    code: Any = 0 if error is None else 1
    if isinstance(error, SystemExit):
        code = error.code if error.code is not None else 0
        if not isinstance(code, int):
            sys.stderr.write(f"{code}\n")
            code = 1
    interrupted = isinstance(error, KeyboardInterrupt)
    error = None
    ended: Callable[[], None] = vars(threading)["_shutdown"]
    ended()
    run: Callable[[], None] = vars(atexit)["_run_exitfuncs"]
    run()
    if threading.active_count() == 1:
        _forget(before)
    else:  # Threads may use everything; but what was written is to be in its file.
        _flush()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 0xFF)


def _forget(before: frozenset[str]) -> None:
    """Drop what the program made, so that its files are closed and its finalizers run."""
    made = [name for name in sys.modules if name not in before or name == "__main__"]
    modules = [sys.modules[name] for name in reversed(made)]
    for module in modules:
        names = getattr(module, "__dict__", {})
        for name in [name for name in names if name != "__builtins__"]:
            names[name] = None
    del modules
    gc.collect()


def _flush() -> None:
    for found in gc.get_objects():  # Made since the fork: what was there before is frozen.
        if issubclass(type(found), io.TextIOWrapper | io.BufferedWriter | io.BufferedRandom):
            with contextlib.suppress(ValueError, OSError):  # Closed, or for reading alone.
                found.flush()


if __name__ == "__main__":
    main()
