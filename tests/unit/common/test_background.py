"""A background task that fails ends its owner, with the reason."""

import asyncio
import threading
from collections.abc import Callable

import pytest

from slackwater.common.base.background import Background
from slackwater.common.base.errors import Fatal


async def raising() -> None:
    raise ValueError("injected")


def raising_at_once(*_: object) -> None:
    raise ValueError("injected")


def by_task(background: Background) -> None:
    background.spawn(raising())


def by_group(background: Background) -> None:
    background.group().spawn(raising())


def by_callback(background: Background) -> None:
    asyncio.get_running_loop().call_soon(background.guarded(raising_at_once))


def by_call_from_a_thread(background: Background) -> None:
    loop = asyncio.get_running_loop()
    threading.Thread(target=background.post, args=(loop, raising_at_once)).start()


def by_thread(background: Background) -> None:
    background.thread(raising_at_once, "raising-thread").start()


@pytest.mark.parametrize("fail", [by_task, by_group, by_callback, by_call_from_a_thread, by_thread])
async def test_a_failure_that_nobody_awaits_ends_its_owner(
    fail: Callable[[Background], None],
) -> None:
    background = Background()
    fail(background)
    with pytest.raises(Fatal, match=r"^raising.* failed: ValueError\('injected'\)$"):
        await background.alongside(asyncio.Event().wait())
    assert background.failure is not None


async def test_a_group_is_cancelled_and_waited_for_by_itself_and_with_its_owner() -> None:
    background = Background()
    group, other = background.group(), background.group()
    ours = [group.spawn(asyncio.Event().wait()) for _ in range(2)]
    theirs = other.spawn(asyncio.Event().wait())
    assert (background.running, group.running, other.running) == (3, 2, 1)
    await group.close()
    assert all(task.cancelled() for task in ours)
    assert (background.running, group.running, other.running) == (1, 0, 1)
    group.spawn(asyncio.sleep(0))
    await group.ended()
    background.cancel()
    await other.begun_ended()
    assert theirs.cancelled()
    assert (background.running, background.failure) == (0, None)


async def test_those_that_were_begun_are_waited_for_and_later_ones_not() -> None:
    group, go = Background().group(), asyncio.Event()
    group.spawn(go.wait())
    waiting = asyncio.ensure_future(group.begun_ended())
    await asyncio.sleep(0)
    late = group.spawn(asyncio.Event().wait())
    go.set()
    await waiting
    assert not late.done()
    await group.close()


async def test_a_failure_that_came_before_is_not_forgotten() -> None:
    background = Background()
    background.spawn(raising())
    await asyncio.sleep(0.01)
    with pytest.raises(Fatal, match="injected"):
        await background.alongside(asyncio.sleep(3600))


async def test_an_owner_is_true_with_tasks_and_without() -> None:
    """`background or Background()` gave a part an owner of its own, which nobody looked at."""
    assert Background()


async def test_work_that_ends_by_itself_has_its_result() -> None:
    background = Background()
    cancelled = background.spawn(asyncio.Event().wait())
    assert await background.alongside(asyncio.sleep(0.01, "done")) == "done"
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    assert background.failure is None


async def test_a_thread_is_joined_without_another_one() -> None:
    background, go = Background(), threading.Event()
    thread = background.thread(lambda: bool(go.wait()) or None, "waiting")
    await thread.join()  # It was not started yet.
    thread.start()
    joining = asyncio.ensure_future(thread.join())
    await asyncio.sleep(0.01)
    assert not joining.done()
    go.set()
    await joining
    assert not any(one.name == "waiting" for one in threading.enumerate())


async def test_nothing_is_posted_to_a_loop_that_is_closed() -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    assert not Background().post(loop, raising_at_once)
