"""Logs: one JSON line an event on standard error, from every service the same.

What libraries log through the standard module comes out in the same form. Nothing on a path that
is walked per push, page or request may log. Where standard error is the journal's stream, each line
begins with its priority (`<4>`), which journald takes off: `journalctl -p warning` then works.
"""

import logging
import os
import sys
from typing import Any, Final

import msgspec
import structlog

from slackwater.common.base import tracing

_json = msgspec.json.Encoder(enc_hook=str, order="deterministic")

PRIORITIES: Final = {"critical": 2, "error": 3, "warning": 4, "info": 6, "debug": 7}
"""Syslog's numbers of the levels, as sd-daemon(3) takes them; another level is a notice, 5."""


def configure(level: str = "info", **fields: Any) -> None:
    """Set up this process's logs; `fields` (service, id, pid) are on every line."""
    structlog.reset_defaults()
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        _add_trace,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="at"),
        _add(fields),
    ]
    render: list[Any] = [structlog.processors.format_exc_info, _render(_is_journal())]
    number = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[*shared, *render],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(number, logging.WARNING))


def _add(fields: dict[str, Any]) -> Any:
    def add(_logger: Any, _method: str, event: dict[str, Any]) -> dict[str, Any]:
        return {**fields, **event}

    return add


def _add_trace(_logger: Any, _method: str, event: dict[str, Any]) -> dict[str, Any]:
    """Name the trace, where what is done is part of one."""
    found = tracing.trace_id()
    return {**event, "trace": found} if found else event


def _is_journal() -> bool:
    """Say whether standard error is the stream that systemd names; systemd.exec(5), JOURNAL_STREAM.
    A child whose standard error is a file has the variable too."""
    try:
        at = os.fstat(sys.stderr.fileno())
    except (OSError, ValueError):  # A stream without a descriptor, or a closed one.
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{at.st_dev}:{at.st_ino}"


def _render(with_priority: bool) -> Any:
    def render(_logger: Any, _method: str, event: dict[str, Any]) -> str:
        line = _json.encode(event).decode()
        return f"<{PRIORITIES.get(event['level'], 5)}>{line}" if with_priority else line

    return render
