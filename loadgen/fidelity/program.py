"""The program of an emulated GPU job: it sleeps an iteration after the other, saves when it is told
to stop, and goes on from what it saved.

    python -I -S program.py FOLDER ITERATIONS ITERATION_S SAVE_S

It imports nothing that a bare interpreter does not have, so that sixteen of them start on a small
machine. All ranks count alike; rank 0 writes the job's files into FOLDER:

    saved      iterations that are done, written whole after SAVE_S seconds of saving
    now        iterations so far, about twice a second
    attempts   a line for each attempt: its number, when it began, when it ended (seconds since
               1970), iterations before and after
"""

# ruff: noqa: TID251 (it is a user's program, and tells the time as its node does)
import os
import signal
import sys
import time

LOOK_S = 0.1
"""Seconds between two looks at the clock, or an iteration, if that is longer."""
TELL_S = 0.5


class Stopped(BaseException):
    """SIGTERM came."""


def stop(*_: object) -> None:
    raise Stopped


def saved(folder: str) -> int:
    try:
        with open(os.path.join(folder, "saved")) as file:
            return int(file.read())
    except FileNotFoundError:
        return 0


def write(path: str, text: str) -> None:
    with open(path + ".new", "w") as file:
        file.write(text)
    os.replace(path + ".new", path)


def main(words: list[str]) -> int:
    folder, iterations, iteration_s, save_s = words[0], int(words[1]), float(words[2]), words[3]
    first, attempt = os.environ["SLACKWATER_RANK"] == "0", os.environ["SLACKWATER_ATTEMPT"]
    began_s = time.time()
    before = done = saved(folder)
    told_s = began_s
    now = os.path.join(folder, "now")
    try:
        signal.signal(signal.SIGTERM, stop)
        while done < iterations:
            step = max(1, int(LOOK_S / iteration_s)) if first else iterations
            due = min(iterations, done + step)
            while (left_s := began_s + (due - before) * iteration_s - time.time()) > 0:
                time.sleep(left_s)
            done = due
            if first and time.time() - told_s >= TELL_S:
                told_s = time.time()
                write(now, str(done))
    except Stopped:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if first:
            time.sleep(float(save_s))
            done = before + int((time.time() - float(save_s) - began_s) / iteration_s)
            done = min(done, iterations)
    if done >= iterations:
        write(os.environ["SLACKWATER_RESULT"], "{}")
    if first:
        write(os.path.join(folder, "saved"), str(done))
        with open(os.path.join(folder, "attempts"), "a") as file:
            file.write(f"{attempt} {began_s:.6f} {time.time():.6f} {before} {done}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
