"""One rank of each job is watched, and its watcher rests, more and more."""

import os
import socket
from pathlib import Path

from slackwater.common.native.sockets import ports
from slackwater.services.worker.processes import RankFiles
from slackwater.services.worker.traffic import lowest
from slackwater.services.worker.traffic_program import (
    PAUSE,
    REST_S,
    REST_S_MAX,
    Inbox,
    rest_s,
)
from slackwater.services.worker.traffic_talk import Orders


def test_one_rank_of_each_job_is_watched() -> None:
    ranks = [RankFiles(Path("/x"), job, rank) for job, rank in (("a", 3), ("b", 1), ("a", 2))]
    assert [(each.job, each.rank) for each in lowest(ranks)] == [("b", 1), ("a", 2)]
    assert lowest([]) == []


def test_small_segments_are_watched_in_windows() -> None:
    assert rest_s(10.0, small=False, windows=0) == REST_S
    assert rest_s(10.0, small=True, windows=0) == 10.0 * PAUSE
    assert rest_s(0.1, small=True, windows=0) == REST_S


def test_what_is_known_is_watched_less_and_less() -> None:
    rests = [rest_s(1.0, small=False, windows=windows) for windows in range(2000)]
    assert rests[:3] == [REST_S, 2 * REST_S, 4 * REST_S]
    assert rests[-1] == REST_S_MAX


def test_ports_are_those_of_the_process_alone() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, socket.create_connection(listener.getsockname()) as stream:
        accepted, _ = listener.accept()
        own = {stream.getsockname()[1], accepted.getsockname()[1]}
        assert own <= ports([os.getpid()])
        assert not own & ports([1])
        accepted.close()
    assert ports([2**22 + 1]) == set()


def test_the_last_orders_count_and_no_sender_means_the_end() -> None:
    reading, writing = os.pipe()
    inbox = Inbox(reading)
    inbox.wait(0.0)
    assert inbox.orders == Orders()
    os.write(writing, b'{"targets":[{"key":"a","pids":[1],"ports":[2],"workers":2}]}\n{"targets"')
    inbox.wait(1.0)
    assert [target.key for target in inbox.orders.targets] == ["a"]
    os.write(writing, b":[]}\n")
    inbox.wait(1.0)
    assert inbox.orders == Orders()
    os.close(writing)
    ended = False
    try:
        inbox.wait(1.0)
    except EOFError:
        ended = True
    os.close(reading)
    assert ended
