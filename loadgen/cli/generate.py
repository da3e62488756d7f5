"""`loadgen generate`: a paper's own workload, as a trace."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from slackwater.common.base.errors import Rejected
from slackwater.console.options import Seed
from slackwater.console.outcome import Usage, err, reported
from slackwater.loadgen.generate import WORKLOADS
from slackwater.loadgen.generate import generate as generated
from slackwater.loadgen.traces import write


def generate(
    workload: Annotated[str, typer.Argument(help=f"One of {', '.join(sorted(WORKLOADS))}.")],
    seed: Seed = 1,
    option: Annotated[
        list[str] | None, typer.Option("--set", help="A setting as NAME=VALUE; may be repeated.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The file to write; by default standard output.")
    ] = None,
) -> None:
    """Write a paper's own workload, drawn from its published distributions, as CSV."""
    with reported():
        text = write(generated(workload, seed, **_knobs(option or [])))
        if out is None:
            sys.stdout.write(text)
        else:
            try:
                out.write_text(text)
            except OSError as error:
                why = f"cannot be written ({error.strerror}); name another file"
                raise Rejected(f"--out {out}: {why}") from error
            err.print(f"{text.count(chr(10)) - 1} jobs in {out}")


def _knobs(words: list[str]) -> dict[str, str]:
    knobs = {}
    for word in words:
        name, separator, value = word.partition("=")
        if not separator:
            raise Usage(f"--set {word!r}: give NAME=VALUE")
        knobs[name] = value
    return knobs
