"""Keeps a terminal for the program of a rank: `slackwater launch --pty` starts it in its place.

It is a program of its own (`python -m slackwater.services.worker.terminal_program WIDTHxHEIGHT
SECONDS COMMAND ...`). The command runs in a terminal that this process holds, so that it outlives
the worker service and the person who sits there. What it shows goes to this process's output, which
is the rank's log. What is typed comes by a socket from the worker service (terminals.py). It ends
as the command does; after SECONDS in which nobody sat there it hangs up, as a closed window does.
"""

import asyncio
import contextlib
import os
import pty
import signal
import sys
import termios
from pathlib import Path
from typing import Final

from slackwater.common.base import codec
from slackwater.common.base.errors import DecodeRejected
from slackwater.common.transport.socket_files import bind, within
from slackwater.schemas.terminals import SOCKET, Typed, TypeIn

NOT_FOUND: Final = 127
_SIGNALLED: Final = 128
_READ_BYTES: Final = 64 * 1024
_LAST_READS: Final = 64
_SEATS_MAX: Final = 64
_REQUEST_S: Final = 5.0
_HANG_UP_S: Final = 5.0
"""Seconds between the hang-up and the end by force."""


def main() -> None:
    size, alone_s, *command = sys.argv[1:]
    columns, rows = map(int, size.split("x"))
    pid, descriptor = pty.fork()
    if not pid:
        termios.tcsetwinsize(0, (rows, columns))
        _become(command)
    path = Path(os.environ[SOCKET])
    terminal = Terminal(pid, descriptor, float(alone_s))
    asyncio.run(terminal.keep(path))
    path.unlink(missing_ok=True)
    sys.exit(terminal.ended())


def _become(command: list[str]) -> None:
    """Run the command in this process, which was forked a moment ago."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)  # noqa: S606 - the user's own command
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
        os._exit(NOT_FOUND)


class Terminal:
    """The terminal `descriptor`, in which the process `pid` leads a session."""

    def __init__(self, pid: int, descriptor: int, alone_s: float) -> None:
        self._pid, self._descriptor, self._alone_s = pid, descriptor, alone_s
        os.set_blocking(descriptor, False)
        self._places: dict[str, int] = {}
        """Seat -> bytes that were typed from there; those used last come last."""
        self._alone: asyncio.TimerHandle | None = None

    async def keep(self, path: Path) -> None:
        """Serve at `path` until the command has ended."""
        loop = asyncio.get_running_loop()
        over = asyncio.Event()
        process = os.pidfd_open(self._pid)
        loop.add_reader(process, over.set)
        loop.add_reader(self._descriptor, self._show)
        loop.add_signal_handler(signal.SIGTERM, self._hang_up)
        with within(str(path)) as short:
            server = await asyncio.start_unix_server(self._serve, sock=bind(short))
        self._somebody_is_there()
        await over.wait()
        server.close()

    def ended(self) -> int:
        """Print what is left, and return the exit code of the command, as a shell says it."""
        for _ in range(_LAST_READS):  # A process that it left behind may print for ever.
            with contextlib.suppress(BlockingIOError):
                if self._printed():
                    continue
            break
        code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        return _SIGNALLED - code if code < 0 else code

    # Output ---------------------------------------------------------------------------------------

    def _show(self) -> None:
        try:
            more = self._printed()
        except BlockingIOError:
            return
        if not more:
            asyncio.get_running_loop().remove_reader(self._descriptor)

    def _printed(self) -> bool:
        """Print what the command shows; False: no process has the terminal open. Raises
        BlockingIOError: there is nothing at this moment."""
        try:
            shown = os.read(self._descriptor, _READ_BYTES)
        except BlockingIOError:
            raise
        except OSError:
            return False
        _print(shown)
        return bool(shown)

    # Input ----------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(TimeoutError, DecodeRejected, OSError), contextlib.closing(writer):
            async with asyncio.timeout(_REQUEST_S):
                asked = codec.decode(await reader.read(), TypeIn)
                writer.write(codec.encode(self._take(asked)))
                await writer.drain()

    def _take(self, asked: TypeIn) -> Typed:
        """Type what is new, as far as the command has room for it."""
        self._somebody_is_there()
        size = asked.rows, asked.columns
        if all(size) and termios.tcgetwinsize(self._descriptor) != size:
            termios.tcsetwinsize(self._descriptor, size)
        place = self._places.pop(asked.seat, 0)
        if asked.place <= place and (new := asked.data[place - asked.place :]):
            with contextlib.suppress(OSError):  # It reads nothing now, or has ended.
                place += os.write(self._descriptor, new)
        self._places[asked.seat] = place
        if len(self._places) > _SEATS_MAX:
            del self._places[next(iter(self._places))]
        return Typed(job=asked.job, rank=asked.rank, attempt=asked.attempt or 0, place=place)

    # The end --------------------------------------------------------------------------------------

    def _somebody_is_there(self) -> None:
        if self._alone is not None:
            self._alone.cancel()
        self._alone = asyncio.get_running_loop().call_later(self._alone_s, self._nobody_is_there)

    def _nobody_is_there(self) -> None:
        _print(f"\r\nnobody sat here for {self._alone_s:g} s: the terminal hangs up\r\n".encode())
        self._hang_up()

    def _hang_up(self) -> None:
        """End the command as the end of a terminal does; a shell passes it on to its jobs."""
        self._signal(signal.SIGHUP)
        self._signal(signal.SIGCONT)
        asyncio.get_running_loop().call_later(_HANG_UP_S, self._signal, signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, number)


def _print(shown: bytes) -> None:
    while shown:
        shown = shown[os.write(1, shown) :]


if __name__ == "__main__":
    main()
