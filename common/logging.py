"""Logs: one JSON line an event on standard error, from every service the same.

What libraries log through the standard module comes out in the same form. Nothing on a path that
is walked per push, page or request may log.
"""

import logging
import sys
from typing import Any

import msgspec
import structlog

_json = msgspec.json.Encoder(enc_hook=str, order="deterministic")


def configure(level: str = "info", **fields: Any) -> None:
    """Set up this process's logs; `fields` (service, id, pid) are on every line."""
    structlog.reset_defaults()
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="at"),
        _add(fields),
    ]
    render: list[Any] = [structlog.processors.format_exc_info, _render]
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


def _render(_logger: Any, _method: str, event: dict[str, Any]) -> str:
    return _json.encode(event).decode()
