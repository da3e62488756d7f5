"""Calls the operator's hook that adds and returns machines and aggregators: a command, or a
webhook.

    HOOK add ID COUNT                   HOOK return ID MACHINE ...
    HOOK add-aggregators ID COUNT       HOOK return-aggregators ID AGGREGATOR ...

A command takes the order by exit status 0; the last line of what it prints on stderr is the reason
of a refusal. A webhook (http://, https://) is posted {"id", "order", "count" | "machines" |
"aggregators"} as JSON and takes the order by a status of 2xx. Either is given `within_s`, and is
told an order again under the same id where its answer was lost. A hook that takes longer is killed,
and has not taken it.
"""

import asyncio
import os
import shlex
import signal
from typing import Final
from urllib import request
from urllib.error import URLError

import msgspec

from slackwater.services.master.autoscaling import CallHook, HookEnded

WEBHOOKS: Final = ("http://", "https://")
SAID_MAX: Final = 400
"""Letters of a refusal's reason."""


async def call(effect: CallHook) -> HookEnded:
    """Handler of `CallHook`."""
    if effect.hook.startswith(WEBHOOKS):
        failure = await asyncio.to_thread(_post, effect)
    else:
        failure = await _run(effect)
    return HookEnded(effect.id, failure[-SAID_MAX:])


async def _run(effect: CallHook) -> str:
    words = [*shlex.split(effect.hook), effect.verb, effect.id, *effect.machines]
    try:
        process = await asyncio.create_subprocess_exec(
            *words, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        return f"autoscale_hook {effect.hook}: {error.strerror}; name a program that may be run"
    assert process.stderr is not None
    try:
        async with asyncio.timeout(effect.within_s):
            said, status = (await _tail(process.stderr), await process.wait())
    except TimeoutError:
        return f"autoscale_hook did not end within {effect.within_s:g} s (autoscale_hook_s)"
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    last = said.strip().rpartition("\n")[2]
    return "" if status == 0 else f"autoscale_hook ended with {status}: {last or 'it says nothing'}"


async def _tail(stream: asyncio.StreamReader) -> str:
    """Read all, and keep the end."""
    kept = b""
    while part := await stream.read(4096):
        kept = (kept + part)[-4096:]
    return kept.decode(errors="replace")


def _post(effect: CallHook) -> str:
    told: dict[str, object] = {"id": effect.id, "order": effect.verb}
    if effect.verb.startswith("add"):
        told["count"] = int(effect.machines[0])
    else:
        what = "machines" if effect.verb == "return" else "aggregators"
        told[what] = list(effect.machines)
    asked = request.Request(  # noqa: S310  # `call` has seen that it is http or https.
        effect.hook, msgspec.json.encode(told), {"Content-Type": "application/json"}
    )
    try:
        with request.urlopen(asked, timeout=effect.within_s):  # noqa: S310
            return ""
    except (URLError, OSError) as error:
        return f"autoscale_hook {effect.hook}: {error}"
