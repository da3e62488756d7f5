"""The threads of a slot: all work, one that is late is not waited for, and all time is counted."""

import threading
import time

from slackwater.services.aggregator.fold_threads import Team


def test_everybody_works_and_one_no_is_a_no() -> None:
    team = Team(2)
    together = threading.Barrier(3)
    seen: set[int] = set()

    def work() -> bool:
        together.wait(10)
        seen.add(threading.get_ident())
        return threading.get_ident() != threading.main_thread().ident

    assert not team(work)
    assert len(seen) == 3
    team.close()


def test_the_helpers_cpu_time_is_counted() -> None:
    team = Team(1)
    together = threading.Barrier(2)

    def work() -> bool:
        together.wait(10)
        begun_s = time.thread_time()
        while time.thread_time() - begun_s < 0.01:
            pass
        return True

    assert team(work)
    assert team.cpu_s >= 0.01
    team.close()


def test_a_helper_that_never_began_is_not_waited_for() -> None:
    """Its threads are busy elsewhere: the caller does all of it alone."""
    team = Team(1)
    leave, inside = threading.Event(), threading.Event()

    def linger() -> bool:
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            leave.wait(10)
        return True

    blocked = threading.Thread(target=lambda: team._pool.submit(linger).result())
    blocked.start()
    inside.wait(10)
    done: list[bool] = []
    assert team(lambda: done.append(True) is None)
    assert done == [True]
    leave.set()
    blocked.join()
    team.close()
