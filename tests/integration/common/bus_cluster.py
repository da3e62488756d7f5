"""Three real nats-servers in one cluster, on loopback, and certificates for them."""

import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from tests.ports import free_ports

from slackwater.common.bus.server import find_server


class BusCluster:
    """`kill(n)` is kill -9; `start(n)` starts that server again over its folder."""

    def __init__(self, folder: Path, servers: int = 3, more: Sequence[str] = ()) -> None:
        self.folder, self.more = folder, more
        ports = free_ports(2 * servers)
        self.ports, self.routes = ports[:servers], ports[servers:]
        self.processes: list[subprocess.Popen[bytes] | None] = [None] * servers

    @property
    def url(self) -> str:
        return ",".join(f"nats://127.0.0.1:{port}" for port in self.ports)

    def start(self, number: int) -> None:
        folder = self.folder / f"n{number}"
        folder.mkdir(parents=True, exist_ok=True)
        config = folder / "nats.conf"
        routes = ", ".join(f'"nats://127.0.0.1:{port}"' for port in self.routes)
        lines = [
            f'server_name: "n{number}"',
            f'listen: "127.0.0.1:{self.ports[number]}"',
            f'jetstream {{ store_dir: "{folder}", sync_interval: always }}',
            f'cluster {{ name: "test", listen: "127.0.0.1:{self.routes[number]}", '
            f"no_advertise: true, routes: [{routes}] }}",
            *self.more,
        ]
        config.write_text("\n".join(lines) + "\n")
        with (folder / "log").open("ab") as log:
            self.processes[number] = subprocess.Popen(
                [find_server(), "-c", str(config)], stdout=log, stderr=log, start_new_session=True
            )

    def kill(self, number: int) -> None:
        self._end(number, signal.SIGKILL)

    def _end(self, number: int, how: signal.Signals) -> None:
        process, self.processes[number] = self.processes[number], None
        if process is not None:
            process.send_signal(how)
            process.wait(20)

    def __enter__(self) -> "BusCluster":
        for number in range(len(self.processes)):
            self.start(number)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number in range(len(self.processes)):
            self._end(number, signal.SIGKILL)
