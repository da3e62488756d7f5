"""What `loadgen` does: replays workloads against live clusters, simulates them at trace scale,
generates them."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from slackwater.cli import where
from slackwater.cli.outcome import err, reported
from slackwater.common.errors import Rejected
from slackwater.loadgen.generate import WORKLOADS
from slackwater.loadgen.generate import generate as generated
from slackwater.loadgen.traces import write

ON_DEMAND: Final = {
    "demo": ("slackwater.cli.demo", "show"),
    "experiment": ("slackwater.cli.experiment", "play"),
    "replay": ("slackwater.cli.replay", "replay"),
    "memory": ("slackwater.cli.memory_workloads", "memory"),
    "simulate": ("slackwater.loadgen.simulator.command", "simulate_command"),
    "audit": ("slackwater.loadgen.simulator.command", "audit_command"),
}


class OnDemand(TyperGroup):
    """A command's module is imported when the command is asked for: a simulation needs no bus."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*ON_DEMAND, *super().list_commands(ctx)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in ON_DEMAND:
            return super().get_command(ctx, cmd_name)
        module, function = ON_DEMAND[cmd_name]
        alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        alone.command(cmd_name)(getattr(import_module(module), function))
        return typer.main.get_command(alone)


app = typer.Typer(
    cls=OnDemand,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Workloads for Slackwater: live replay, memory, simulation, generation.",
    epilog="Exit codes: 0 done, 1 failed, 2 usage, 3 inconclusive, 65 bad input, 69 nobody "
    "answers, 75 try later, 78 bad configuration, 130 interrupted.",
)
app.callback()(where.identify)


@app.command()
def generate(
    workload: Annotated[str, typer.Argument(help=f"One of {', '.join(sorted(WORKLOADS))}.")],
    seed: int = 1,
    option: Annotated[
        list[str] | None, typer.Option("--set", help="A knob as NAME=VALUE; may be repeated.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="A file; else standard output.")] = None,
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
            raise Rejected(f"--set {word!r}: give NAME=VALUE")
        knobs[name] = value
    return knobs
