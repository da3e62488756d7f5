"""Records spans with OpenTelemetry: where its variables name a collector, and the extra `otel` is
installed.

The library's own variables apply: OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_EXPORTER_OTLP_HEADERS,
OTEL_TRACES_SAMPLER, OTEL_RESOURCE_ATTRIBUTES. Spans leave from a thread of the library's; what a
collector does not take in time is dropped.
"""

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final, Literal

import structlog

from slackwater.common.base import tracing
from slackwater.common.base.rare_log import RareLog

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

VARIABLES: Final = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_FLUSH_S: Final = 2.0
_log = structlog.get_logger()


@contextmanager
def recording(service: str, id: str, environment: Mapping[str, str]) -> Iterator[None]:
    """Record spans of this process meanwhile, if a collector is named."""
    named = next((name for name in VARIABLES if environment.get(name)), "")
    if not named:
        yield
        return
    try:
        recorder = Recorder(_provider(service, id))
    except ImportError as error:
        _log.warning("spans.not-recorded", reason=f"{named} is set, and {error.name} is not there: "
                     "pip install 'slackwater[otel]', or unset it")  # fmt: skip
        yield
        return
    _hear_the_library()
    tracing.install(recorder)
    try:
        yield
    finally:
        tracing.install(None)
        recorder.close()


class _Complaints(logging.Handler):
    """Spans that a collector did not take: a few lines say so, not one for each try."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self._log = RareLog(_log, time.monotonic)

    def emit(self, record: logging.LogRecord) -> None:
        self._log.warning("spans.lost", reason=record.getMessage())


def _hear_the_library() -> None:
    logger = logging.getLogger("opentelemetry")
    logger.handlers[:], logger.propagate = [_Complaints()], False


def _provider(service: str, id: str) -> "TracerProvider":
    """Raises ImportError."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create(
        {
            "service.name": f"slackwater-{service}" if service else "slackwater",
            "service.instance.id": id,
            "service.version": version("slackwater"),
        }
    )
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


class Recorder:
    """A `Tracer`: each span is one of the provider's."""

    def __init__(self, provider: "TracerProvider") -> None:
        from opentelemetry import trace

        self._provider = provider
        self._trace = trace
        self._tracer = provider.get_tracer("slackwater", version("slackwater"))
        self._kinds = {"server": trace.SpanKind.SERVER, "client": trace.SpanKind.CLIENT}

    def begin(self, name: str, kind: Literal["server", "client"], parent: str) -> "_Span":
        context = self._context(parent) if parent else None
        span = self._tracer.start_span(
            name, context, self._kinds[kind], {"messaging.system": "nats"}
        )
        return _Span(span, parent, self._trace)

    def _context(self, header: str) -> Any:
        trace = self._trace
        _, trace_id, span_id, flags, *_ = header.split("-")
        parent = trace.SpanContext(
            int(trace_id, 16), int(span_id, 16), True, trace.TraceFlags(int(flags, 16))
        )
        return trace.set_span_in_context(trace.NonRecordingSpan(parent))

    def close(self) -> None:
        """Send what was recorded, within two seconds: the library would try for ten."""
        sending = threading.Thread(target=self._provider.shutdown, daemon=True)
        sending.start()
        sending.join(_FLUSH_S)


class _Span:
    def __init__(self, span: Any, parent: str, trace: Any) -> None:
        self._span, self._trace = span, trace
        at = span.get_span_context()
        ids = f"{trace.format_trace_id(at.trace_id)}-{trace.format_span_id(at.span_id)}"
        self.header = f"00-{ids}-{at.trace_flags:02x}" if at.is_valid else parent

    def tag(self, name: str, value: str) -> None:
        self._span.set_attribute(name, value)

    def end(self, error: str) -> None:
        if error:
            self._span.set_status(self._trace.StatusCode.ERROR, error)
        self._span.end()
