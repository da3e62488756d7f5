"""The program of an emulated GPU job whose training is reckoned elsewhere, from measured profiles.

    python -I -S waiting_program.py SOCKET SAVE_S

Each rank tells the experiment, over its Unix socket, which job and attempt it is of, and the GPUs
that it holds; then it waits. The experiment answers `done` once the job's training is over. Told
to stop, rank 0 says so, saves for SAVE_S seconds and ends; the others end at once.
"""

import os
import signal
import socket
import sys
import time
from typing import Never


class Stopped(BaseException):
    """SIGTERM came."""


def stop(*_: object) -> Never:
    raise Stopped


def main(path: str, save_s: float) -> int:
    first = os.environ["SLACKWATER_RANK"] == "0"
    names = ("SLACKWATER_JOB", "SLACKWATER_ATTEMPT", "SLACKWATER_RANK", "SLACKWATER_GPUS")
    answer = b""
    with socket.socket(socket.AF_UNIX) as line:
        try:
            signal.signal(signal.SIGTERM, stop)
            line.connect(path)
            line.sendall(" ".join(os.environ[name] for name in names).encode() + b"\n")
            answer = line.recv(16)
        except Stopped:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if first:
                line.sendall(b"stopping\n")
                time.sleep(save_s)
    if answer == b"done":
        with open(os.environ["SLACKWATER_RESULT"], "w") as file:
            file.write("{}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2])))
