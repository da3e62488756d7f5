"""Arrays larger than their local memory, with the kernel's own faults: every page right, or SIGBUS.

The backup file stands behind them, which is slower than slabs: more happens meanwhile.
"""

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.waiting import eventually, gone

from slackwater.common.base.errors import ConfigRejected, Rejected, Unavailable
from slackwater.loadgen.memory.checker import content
from slackwater.memory import RemoteArray
from slackwater.memory.array import array, userfault
from slackwater.memory.store import PAGE_BYTES

CACHE_BYTES = 256 * 1024
PAGES = 4 * CACHE_BYTES // PAGE_BYTES


@pytest.fixture(scope="module", autouse=True)
def allowed() -> None:
    try:
        os.close(userfault.open_userfault())
    except ConfigRejected as error:
        pytest.skip(str(error))


@pytest.fixture
def pages() -> Iterator[RemoteArray]:
    """Four times its local memory; a row is a page."""
    made = RemoteArray((PAGES, PAGE_BYTES), np.uint8, cache_bytes=CACHE_BYTES, delay_s=0.0002)
    yield made
    made.close()


def put(pages: RemoteArray, page: int, generation: int) -> None:
    pages[page] = np.frombuffer(content(page, generation), np.uint8)


def test_random_access_from_two_threads_finds_every_page_as_it_was_written(
    pages: RemoteArray,
) -> None:
    """Each thread has every other page, reads what it wrote last (or zeros), writes anew; a third
    flushes all the time, so that pages are protected and copied under the writers' hands."""
    wrong: list[str] = []
    ended = threading.Event()

    def work(mine: int) -> None:
        rng = np.random.default_rng(mine)
        newest = dict.fromkeys(range(mine, PAGES, 2), 0)
        for generation in range(1, 2500):
            page = int(rng.integers(PAGES // 2)) * 2 + mine
            if pages[page].tobytes() != content(page, newest[page]):
                wrong.append(f"page {page} is not generation {newest[page]}")
                return
            if rng.random() < 0.5:
                put(pages, page, generation)
                newest[page] = generation
        for page, generation in newest.items():
            if pages[page].tobytes() != content(page, generation):
                wrong.append(f"page {page} at the end is not generation {generation}")

    def flush() -> None:
        while not ended.wait(0.01):
            pages.flush()

    threads = [threading.Thread(target=work, args=(mine,)) for mine in (0, 1)]
    flushing = threading.Thread(target=flush)
    for thread in (*threads, flushing):
        thread.start()
    for thread in threads:
        thread.join()
    ended.set()
    flushing.join()
    assert not wrong
    seen = pages.figures()
    assert seen["evicted"] > PAGES
    assert seen["written_back"] > PAGES
    assert seen["resident"] <= CACHE_BYTES // PAGE_BYTES


def test_words_of_one_page_written_by_two_threads_are_never_lost(pages: RemoteArray) -> None:
    """Counters side by side: a write that raced with an eviction would be one too few."""

    def counters() -> np.ndarray:
        return pages.array.reshape(-1).view(np.int64).reshape(PAGES, -1)

    def count(mine: int) -> None:
        words = counters()
        rng = np.random.default_rng(mine + 10)
        for page in rng.integers(PAGES, size=4000).tolist():
            words[page, mine] += 1

    threads = [threading.Thread(target=count, args=(mine,)) for mine in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for mine in (0, 1):
        expected = np.bincount(
            np.random.default_rng(mine + 10).integers(PAGES, size=4000), minlength=PAGES
        )
        assert (counters()[:, mine] == expected).all()


@pytest.mark.parametrize("stride", [1, 3, -1])
def test_scans_are_prefetched(pages: RemoteArray, stride: int) -> None:
    for page in range(PAGES):
        put(pages, page, 7)
    pages.flush()
    before = pages.figures()
    order = range(PAGES)[::stride]
    for page in order:
        assert pages[page].tobytes() == content(page, 7)
    after = pages.figures()
    moved = {name: after[name] - before[name] for name in after}
    assert moved["accesses"] > 0.6 * len(order)  # Some were still here.
    assert moved["hits"] > 0.9 * moved["accesses"]
    assert moved["faults"] < 0.6 * moved["accesses"]


def test_random_reads_prefetch_nothing(pages: RemoteArray) -> None:
    pages[:] = 1
    pages.flush()
    before = pages.figures()["prefetched"]
    for page in np.random.default_rng(3).permutation(PAGES).tolist():
        assert pages[page, 5] == 1
    assert pages.figures()["prefetched"] - before < PAGES // 20


def test_a_range_comes_before_it_is_touched(pages: RemoteArray) -> None:
    for page in range(PAGES):
        put(pages, page, 3)
    pages.flush()
    assert pages.prefetch(np.s_[10:30]) == 20
    assert pages.prefetch(np.s_[10:30]) == 0
    assert pages.prefetch(5) == 1
    assert pages.prefetch(np.s_[5:5]) == 0
    for page in range(10, 30):
        assert pages[page].tobytes() == content(page, 3)
    with pytest.raises(Rejected, match="slices"):
        pages.prefetch([1, 2])


def test_the_kernel_may_touch_missing_pages_too(pages: RemoteArray, tmp_path: Path) -> None:
    """A read into the array and a write from it, of more than fits."""
    data = np.random.default_rng(4).integers(0, 255, pages.array.nbytes, np.uint8)
    (tmp_path / "in").write_bytes(data.tobytes())
    with (tmp_path / "in").open("rb", buffering=0) as file:
        view = memoryview(pages.array).cast("B")
        while len(view) and (n := file.readinto(view)):
            view = view[n:]
        del view
    with (tmp_path / "out").open("wb", buffering=0) as file:
        assert file.write(pages.array.reshape(-1)) == data.nbytes
    assert (tmp_path / "out").read_bytes() == data.tobytes()


def test_an_array_with_views_is_not_torn_away(pages: RemoteArray) -> None:
    put(pages, 3, 9)
    view = pages[3]
    with pytest.raises(Rejected, match="views"):
        pages.close()
    assert view.tobytes() == content(3, 9)
    del view


def test_a_backup_that_cannot_be_made_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigRejected, match="nowhere"):
        RemoteArray(1000, cache_bytes=CACHE_BYTES, backup=tmp_path / "nowhere" / "backup")


def test_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigRejected, match="objects"):
        RemoteArray(10, object, cache_bytes=CACHE_BYTES)
    with pytest.raises(ConfigRejected, match="at least 262144"):
        RemoteArray(10, cache_bytes=4096)
    with pytest.raises(ConfigRejected, match="0 bytes"):
        RemoteArray(0, cache_bytes=CACHE_BYTES)

    def refuse() -> int:
        raise ConfigRejected("userfaultfd: not permitted; run as root")

    monkeypatch.setattr(array, "open_userfault", refuse)
    with pytest.raises(ConfigRejected, match="run as root"):
        RemoteArray(10, cache_bytes=CACHE_BYTES)


PROGRAM = """
    import os, signal, sys, threading
    import numpy as np
    from slackwater.memory import RemoteArray

    pages = RemoteArray((256, 4096), np.uint8, cache_bytes=256 * 1024)
    pages[:] = 1
    pages.flush()
    pager = pages._process
    os.kill(pager.pid, signal.{how})
    print("touching", flush=True)
    {touch}
    print("survived", flush=True)
"""


@pytest.mark.parametrize(
    ("how", "touch"),
    [
        ("SIGKILL", "pages[::16, 7].sum()"),
        ("SIGKILL", "pager.wait(); pages._watcher.join(); pages[255, 0]"),
    ],
    ids=["while it waits", "later"],
)
def test_a_dead_pager_ends_its_program_with_sigbus_and_a_reason(how: str, touch: str) -> None:
    """The thread that touches the array holds the interpreter lock meanwhile."""
    text = textwrap.dedent(PROGRAM).format(how=how, touch=touch)
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == -signal.SIGBUS
    assert "touching" in done.stdout
    assert "survived" not in done.stdout
    assert "pager of a RemoteArray died" in done.stderr


def test_a_page_that_cannot_be_read_ends_in_sigbus_and_the_others_do_not(tmp_path: Path) -> None:
    """The backup file is cut behind the device's back."""
    text = f"""
        import os
        import numpy as np
        from pathlib import Path
        from slackwater.memory import RemoteArray

        backup = Path({str(tmp_path / "backup")!r})
        pages = RemoteArray(
            (256, 4096), np.uint8, cache_bytes=256 * 1024, backup=backup, patience_s=0.3
        )
        pages[:] = 1
        pages.flush()
        os.truncate(backup, 100 * 4096)
        assert pages[:100, 9].sum() == 100
        print("good", flush=True)
        print(pages[150, 0])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)],
        capture_output=True, text=True, timeout=50, check=False,
    )  # fmt: skip
    assert done.returncode == -signal.SIGBUS, done.stderr
    assert done.stdout == "good\n"
    assert "page.lost" in done.stderr
    assert "pager.failed" not in done.stderr


def test_a_write_that_finds_no_place_ends_in_sigbus_with_its_reason(tmp_path: Path) -> None:
    """The backup's file system is full: the pager keeps what it has, then gives up, loudly."""
    text = """
        import numpy as np, resource, signal
        from slackwater.memory import RemoteArray

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 20, 64 << 20))
        shape = (48 << 20) // 4096, 4096
        pages = RemoteArray(shape, np.uint8, cache_bytes=256 * 1024, patience_s=0.5)
        resource.prlimit(pages._process.pid, resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        pages[:] = 1
        print("survived")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)],
        capture_output=True, text=True, timeout=50, check=False,
    )  # fmt: skip
    assert done.returncode == -signal.SIGBUS, done.stderr
    assert "write-back.failed" in done.stderr
    assert "pager of a RemoteArray died" in done.stderr


def test_a_dead_pager_is_told_by_methods() -> None:
    made = RemoteArray((256, PAGE_BYTES), np.uint8, cache_bytes=CACHE_BYTES)
    made._process.kill()
    with pytest.raises(Unavailable, match="died"):
        made.flush()
    made.close()


def run(text: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)],
        capture_output=True, text=True, timeout=50, check=False, start_new_session=True,
    )  # fmt: skip


def test_a_program_that_forgets_to_close_ends_quietly_and_takes_its_pager_along() -> None:
    done = run("""
        import numpy as np
        from slackwater.memory import RemoteArray

        pages = RemoteArray((256, 4096), np.uint8, cache_bytes=256 * 1024)
        pages[:] = 1
        print(pages._process.pid, flush=True)
    """)
    assert (done.returncode, done.stderr) == (0, "")
    pager = int(done.stdout)
    eventually(lambda: gone(pager), f"pager {pager} ends with its program")


def test_a_view_keeps_its_array_and_the_last_one_lets_it_go() -> None:
    made = RemoteArray((256, PAGE_BYTES), np.uint8, cache_bytes=CACHE_BYTES)
    made[:] = 1
    made.flush()
    process, view = made._process, made.array[::2]
    del made
    gc.collect()
    assert view.sum() == 128 * PAGE_BYTES
    del view
    gc.collect()
    assert process.wait(20) == 0


def test_signals_are_the_programs_and_harm_no_array() -> None:
    """Ctrl-C goes to the whole foreground group; a signal may wake the thread that watches."""
    done = run("""
        import os, signal, threading
        import numpy as np
        from slackwater.memory import RemoteArray

        seen = []
        signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
        pages = RemoteArray((256, 4096), np.uint8, cache_bytes=256 * 1024)
        pages[:] = 1
        for _ in range(20):
            os.killpg(os.getpgrp(), signal.SIGINT)
            signal.pthread_kill(pages._watcher.ident, signal.SIGINT)
            assert pages[::9, 5].sum() == 29
        assert seen
        pages.close()
        print("done")
    """)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_a_pager_that_hangs_counts_as_dead() -> None:
    done = run("""
        import os, signal
        import numpy as np
        from slackwater.common.base import limits
        from slackwater.memory import RemoteArray

        limits.ARRAY_SILENT_S = 3.0
        pages = RemoteArray((256, 4096), np.uint8, cache_bytes=256 * 1024)
        pages[:] = 1
        pages.flush()
        print(pages._process.pid, flush=True)
        os.kill(pages._process.pid, signal.SIGSTOP)
        pages[::16, 7].sum()
        print("survived", flush=True)
    """)
    assert done.returncode == -signal.SIGBUS, done.stderr
    pager = int(done.stdout.splitlines()[0])
    eventually(lambda: gone(pager), f"pager {pager} ends with its program")
    assert "survived" not in done.stdout
    assert "pager of a RemoteArray died" in done.stderr


def test_an_array_is_watched_before_it_can_be_touched(
    pages: RemoteArray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a pager that dies early leaves its program waiting with the interpreter lock held."""
    assert pages._words[array.watcher.WATCHING] == 1
    late = threading.Event()
    watch = array._watch

    def loads_for_long(*known: object) -> None:
        late.wait(0.3)
        watch(*known)

    monkeypatch.setattr(array, "_watch", loads_for_long)
    with RemoteArray(10_000, cache_bytes=CACHE_BYTES) as other:
        assert other._words[array.watcher.WATCHING] == 1
