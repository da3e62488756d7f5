"""`loadgen`: replays workloads against live clusters, and simulates them at trace scale."""

import typer

from slackwater.cli.replay import replay

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Workloads for Slackwater: live replay and simulation.",
)
app.command()(replay)


@app.callback()
def _commands() -> None:
    """Keeps `replay` a sub-command while it is the only one."""


def main() -> None:
    app()


if __name__ == "__main__":
    main()
