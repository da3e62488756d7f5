"""A thousand jobs and two hundred nodes: the page scrolls through all, and no update is missed."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from tests.browser import chromium, opened

from slackwater.client import AsyncClient
from slackwater.common.base.clock import LiveClock
from slackwater.common.bus.memory import MemoryBroker
from slackwater.web.app import Dashboard
from slackwater.web.watch import Watch

JOBS, NODES, ROUNDS = 1_000, 200, 12


@asynccontextmanager
async def served(watch: Watch) -> AsyncIterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    application = Dashboard(watch, None, "scale").application("")
    config = uvicorn.Config(
        application, log_config=None, lifespan="off", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server._serve([listener]))  # Without its signal handlers.
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
    finally:
        server.should_exit = True
        await serving
        listener.close()


def job(id: int) -> dict[str, object]:
    return {
        "state": "running" if id % 4 else "pending", "held": False, "tenant": f"t{id % 7}",
        "model": "", "program": "python", "workers": 1, "servers": 1, "gpus": 1,
        "has": 1 if id % 4 else 0, "nodes": [[f"n{id % NODES}", 1]] if id % 4 else [],
        "aggregators": [], "priority": 0, "submitted_s": float(id), "started_s": 0.0,
        "finished_s": 0.0, "reason": "", "iterations": 1_000_000, "run": 0, "preemptions": 0,
        "restarts": 0,
    }  # fmt: skip


def node(id: int, used: int) -> dict[str, object]:
    return {
        "alive": True, "cordoned": False, "slots": 8, "slots_used": 0, "gpus": 8,
        "gpus_used": used, "gpu_types": ["fake"], "faults": [], "cores": 16, "memory_bytes": 0,
        "rack": "", "jobs": used,
    }  # fmt: skip


async def test_a_thousand_jobs_scroll_and_every_update_arrives() -> None:
    """Takes some seconds: a browser, and rounds of changes half a second apart."""
    chromium()
    clock = LiveClock()
    watch = Watch(AsyncClient(MemoryBroker(1, clock=clock).connect("web"), clock))
    board = watch.board
    for id in range(JOBS):
        board.put("jobs", f"job-{id}", job(id))
        board.put("going", f"job-{id}", [0, 1.0, 100.0, 0.01, 0])
        began = [["running" if id % 4 else "pending", float(id), None, 1 if id % 4 else 0]]
        board.put("lives", f"job-{id}", {"servers": 1, "gpus": 1, "stretches": began, "served": []})
    for id in range(NODES):
        board.put("nodes", f"n{id}", node(id, 0))
    async with served(watch) as url, opened(url + "#/jobs") as seen:
        await seen.until("(n) => sw.data.kind('jobs').size === n", JOBS)
        ids: set[str] = set()
        for turn in range(1, ROUNDS + 1):
            for id in range(JOBS):
                board.put("going", f"job-{id}", [turn * 1000 + id, 1.0, 100.0, 0.01, 0])
            for id in range(NODES):
                board.put("nodes", f"n{id}", node(id, turn % 9))
            watch._tell()
            part = (turn - 1) / (ROUNDS - 1)
            await seen.page.evaluate(
                "(part) => { const s = document.querySelector('.scroller');"
                " s.scrollTop = part * (s.scrollHeight - s.clientHeight); }",
                part,
            )
            await seen.until("(version) => sw.data.version() >= version", board.version)
            await seen.until(
                "(turn) => [...document.querySelectorAll('.tr')].every((row) =>"
                " row.children[4].textContent.startsWith("
                "(turn * 1000 + Number(row.dataset.id.slice(4))).toLocaleString('en-US')))",
                turn,
            )
            ids |= set(
                await seen.page.evaluate(
                    "() => [...document.querySelectorAll('.tr')].map((row) => row.dataset.id)"
                )
            )
        held = await seen.page.evaluate("() => document.querySelectorAll('.tr').length")
        assert held < 60, "only rows in sight are elements"
        assert "job-999" in ids or "job-0" in ids, "the ends were reached"
        mine = await seen.page.evaluate("() => Object.fromEntries(sw.data.kind('going'))")
        assert mine == board.kind("going"), "every job's newest figures"
        assert await seen.page.evaluate("() => Object.fromEntries(sw.data.kind('nodes'))") == (
            board.kind("nodes")
        )
        everything = await seen.page.evaluate(
            """async () => {
              const scroller = document.querySelector('.scroller');
              const found = new Set();
              for (let top = 0; top < scroller.scrollHeight; top += scroller.clientHeight / 2) {
                scroller.scrollTop = top;
                await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
                for (const row of document.querySelectorAll('.tr')) found.add(row.dataset.id);
              }
              return found.size;
            }"""
        )
        assert everything == JOBS
        await seen.go("#/")
        await seen.until("() => sw.page.charts().gpus.values().rows.length === 10")
        board.remove("jobs", "job-1")
        watch._tell()
        await seen.until("() => !sw.data.kind('jobs').has('job-1')")
