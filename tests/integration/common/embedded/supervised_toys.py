"""Starts a supervisor with three toys and waits to be interrupted. Run by the tests."""

import asyncio
import signal
import sys
from pathlib import Path

import uvloop

from slackwater.common.embedded import Supervisor, UnitSpec
from slackwater.common.shell.config import write_config

SCRIPT = Path(__file__).with_name("toy_service.py")


async def run() -> None:
    sys.stdout.write("started\n")
    sys.stdout.flush()
    supervisor = Supervisor()
    try:
        url = await supervisor.start_nats()
        specs = []
        for id in ("t1", "t2", "t3"):
            config = supervisor.run_dir / f"{id}.toml"
            write_config(config, {"id": id, "url": url, "bucket": f"toys-{id}"})
            command = (sys.executable, str(SCRIPT), "--config", str(config))
            specs.append(UnitSpec(name=id, command=command))
        await supervisor.start_units(specs)
        await asyncio.sleep(1000.0)
    finally:
        await supervisor.stop()


if __name__ == "__main__":
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run())
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None
