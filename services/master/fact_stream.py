"""The stream in which the bus keeps facts: the leading master makes and repairs it."""

from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from slackwater.common.base import limits
from slackwater.common.base.errors import SlackwaterError
from slackwater.common.shell.definition import Port
from slackwater.common.shell.world import World
from slackwater.common.store.history import Keeping
from slackwater.services.master.config import MasterConfig

_log = structlog.get_logger()


def keep_facts(world: World, config: MasterConfig) -> Callable[[Port], Coroutine[Any, Any, None]]:
    """A task of the leading master. Jobs do not need the stream: where it cannot be made (no room,
    another stream of these subjects), the log says why, once for each reason."""
    keeping = Keeping(
        nbytes=config.facts_bytes,
        seconds=config.facts_s,
        per_subject=config.facts_per_subject,
        replicas=config.facts_replicas or config.replicas,
    )

    async def facts(port: Port) -> None:
        told = ""
        while True:
            wait_s = limits.FACTS_LOOK_S
            try:
                if await world.history.keep(keeping):
                    _log.info("facts.kept", bytes=keeping.nbytes, seconds=keeping.seconds)
                told = ""
            except SlackwaterError as error:
                wait_s = limits.FACTS_RETRY_S
                port.count("facts_unkept")
                if str(error) != told:
                    told = str(error)
                    _log.warning("facts.unkept", reason=told)
            await world.clock.sleep_until(world.clock.now_s() + wait_s)

    return facts
