"""The port that metrics are read from: few threads, each for a short time.

Whoever connects and asks nothing keeps a thread until it is in the way, and SCRAPE_S at most: one
who asks is served beside any number of those.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from slackwater.common.base import limits


class _Handler(WSGIRequestHandler):
    server: "_Server"
    timeout = limits.SCRAPE_S
    """Seconds for each read, and for sending the answer."""

    def handle(self) -> None:
        with contextlib.suppress(TimeoutError, ConnectionError):  # It asked nothing, or left.
            super().handle()

    def parse_request(self) -> bool:
        understood = super().parse_request()
        self.server.asked(self.request)
        return understood

    def log_message(self, format: str, *args: Any) -> None:
        """A scrape is not worth a line."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, address: str, port: int) -> None:
        if ":" in address:
            self.address_family = socket.AF_INET6
        self._turn = threading.Lock()
        self._slots = threading.BoundedSemaphore(limits.SCRAPES_MAX)
        self._silent: dict[socket.socket, float] = {}
        """Connections whose request has not come, the oldest first, and since when."""
        super().__init__((address, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """One thread for each, SCRAPES_MAX in all: the oldest that asks nothing makes room."""
        if not self._slots.acquire(blocking=False):
            self._end_silent(lambda _since_s: True, at_most=1)
            if not self._slots.acquire(timeout=limits.SCRAPE_S):
                self.shutdown_request(request)
                return
        with self._turn:
            self._silent[request] = time.monotonic()
        try:
            super().process_request(request, client_address)
        except BaseException:  # The limit of threads is reached.
            self._forget(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._forget(request)

    def _forget(self, request: Any) -> None:
        self.asked(request)
        self._slots.release()

    def asked(self, request: Any) -> None:
        """Note that the request arrived whole: it is served to its end."""
        with self._turn:
            self._silent.pop(request, None)

    def service_actions(self) -> None:
        """Called several times a second."""
        super().service_actions()
        now_s = time.monotonic()
        self._end_silent(lambda since_s: now_s - since_s > limits.SCRAPE_S, limits.SCRAPES_MAX)

    def _end_silent(self, due: Callable[[float], bool], at_most: int) -> None:
        """End silent connections; their threads find them ended."""
        with self._turn:
            for request in [each for each, since_s in self._silent.items() if due(since_s)][
                :at_most
            ]:
                del self._silent[request]
                with contextlib.suppress(OSError):  # Its peer may have ended it meanwhile.
                    request.shutdown(socket.SHUT_RDWR)


class ScrapePort:
    """Serves what `registry` collects. Port 0: any free one."""

    def __init__(self, registry: CollectorRegistry, address: str, port: int) -> None:
        """Raises OSError where the port cannot be had."""
        self._server = _Server(address, port)
        self._server.set_app(make_wsgi_app(registry))
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5.0)
