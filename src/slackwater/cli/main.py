"""`slackwater`: the operator's command line."""

import runpy
import sys
from pathlib import Path
from typing import Annotated

import typer

from slackwater.cli import compiling, drain, memory, model, operate, show, up, where
from slackwater.cli.doctor import doctor
from slackwater.cli.outcome import logs_to_stderr
from slackwater.cli.submit import submit

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Puts a deep-learning cluster's slack to work.",
    epilog="Exit codes: 0 done, 1 failed, 2 usage, 3 inconclusive, 65 bad input, 69 nobody "
    "answers, 75 try later, 78 bad configuration, 130 interrupted.",
)
SERVICES = ("master", "controller", "aggregator", "profiler", "worker", "slabd")


@app.command()
def run(
    service: Annotated[str, typer.Argument(help=f"One of {', '.join(SERVICES)}.")],
    config: Annotated[Path, typer.Option(help="The service's TOML file.")],
) -> None:
    """Run one service in the foreground (what systemd calls)."""
    if service not in SERVICES:
        raise typer.BadParameter(f"{service!r}: choose one of {', '.join(SERVICES)}")
    sys.argv = [f"slackwater run {service}", "--config", str(config)]
    runpy.run_module(f"slackwater.services.{service}", run_name="__main__")


app.callback()(where.identify)
app.command()(up.up)
app.command()(submit)
app.command()(operate.cancel)
app.command()(doctor)
app.command(name="compile")(compiling.compile_all)
app.command()(show.jobs)
app.command()(show.job)
app.command()(show.aggregators)
app.command(name="drain")(drain.drain)
app.command()(show.tenants)
app.command()(show.top)
app.command()(show.tap)
app.add_typer(model.app, name="model")
app.add_typer(memory.app, name="memory")


def main() -> None:
    logs_to_stderr()
    app()


if __name__ == "__main__":
    main()
