"""A client of a cluster for Python programs: submit jobs, wait for them, read what they say.

Its parts are loaded when they are first asked for: a command needs few of them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from slackwater.client.asynchronous import AsyncClient, LogLine
    from slackwater.client.happened import Told
    from slackwater.client.reports import JobReport, Period
    from slackwater.client.synchronous import Client
    from slackwater.client.waits import Waited

__all__ = ["AsyncClient", "Client", "JobReport", "LogLine", "Period", "Told", "Waited"]
_HOMES: Final = {
    "AsyncClient": "asynchronous",
    "Client": "synchronous",
    "JobReport": "reports",
    "LogLine": "asynchronous",
    "Period": "reports",
    "Told": "happened",
    "Waited": "waits",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
