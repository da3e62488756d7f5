"""A forked process and the array of its parent: a reason instead of SIGSEGV, and no harm done."""

import os
import subprocess
import sys
import textwrap

import pytest

from slackwater.common.base.errors import ConfigRejected
from slackwater.memory.array import userfault

PROGRAM = """
    import multiprocessing, os, sys, time
    import numpy as np
    from slackwater.common.base.errors import Rejected
    from slackwater.memory import RemoteArray

    pages = RemoteArray((256, 4096), np.uint8, cache_bytes=256 * 1024)
    pages[:] = 7
    view = pages.array

    def forked(work):
        pid = os.fork()
        if pid == 0:
            work()
            os._exit(42)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    {work}
    assert int(pages[::16].sum()) == 16 * 4096 * 7
    del view
    pages.close()
    print("done")
"""


@pytest.fixture(scope="module", autouse=True)
def allowed() -> None:
    try:
        os.close(userfault.open_userfault())
    except ConfigRejected as error:
        pytest.skip(str(error))


def run(work: str) -> subprocess.CompletedProcess[str]:
    lines = textwrap.indent(textwrap.dedent(work), "    ").strip()
    text = textwrap.dedent(PROGRAM.format(work=lines))
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=50, check=False
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    return done


@pytest.mark.parametrize(
    "touch", ["view[200, 5]", "view.__setitem__((3, 5), 1)", "os.write(1, view[9:10])"]
)
def test_a_forked_process_that_touches_a_view_ends_with_a_reason(touch: str) -> None:
    """Read, written, or by the kernel, which may refuse the address instead."""
    done = run(f"""
    def work():
        try:
            {touch}
        except OSError:
            os.write(2, b"a forked process touched, says the kernel")
            os._exit(1)
    assert forked(work) == 1
    """)
    assert done.stderr.count("a forked process touched") == 1


def test_methods_raise_in_a_forked_process_and_close_does_nothing() -> None:
    done = run("""
    def work():
        for use in (lambda: pages[0], pages.flush, pages.figures, lambda: np.asarray(pages)):
            try:
                use()
            except Rejected as error:
                assert "forked" in str(error)
            else:
                os._exit(3)
        pages.close()
    assert forked(work) == 42
    """)
    assert done.stderr == ""


def test_children_of_children_and_of_multiprocessing_are_guarded_too() -> None:
    done = run("""
    def work():
        os._exit(forked(lambda: view[1, 1]))
    assert forked(work) == 1
    one = multiprocessing.get_context("fork").Process(target=lambda: view[77].sum())
    one.start()
    one.join()
    assert one.exitcode == 1
    quiet = multiprocessing.get_context("fork").Process(target=sum, args=((1, 2),))
    quiet.start()
    quiet.join()
    assert quiet.exitcode == 0
    """)
    assert done.stderr.count("a forked process touched") == 2


def test_a_child_that_outlives_the_program_does_not_keep_its_pager() -> None:
    """The program is killed; the pager sees it though the child still lives."""
    run("""
    import psutil
    def work():
        made = RemoteArray((64, 4096), np.uint8, cache_bytes=256 * 1024)
        pager = made._process.pid
        if os.fork() == 0:
            deadline_s = time.monotonic() + 20
            while psutil.pid_exists(pager) and psutil.Process(pager).status() != "zombie":
                if time.monotonic() > deadline_s:
                    os._exit(5)
                time.sleep(0.05)
            os.write(writer, b"gone")
            os._exit(0)
        os.kill(os.getpid(), 9)
    reader, writer = os.pipe()
    assert forked(work) == -9
    os.close(writer)
    assert os.read(reader, 10) == b"gone"
    """)
