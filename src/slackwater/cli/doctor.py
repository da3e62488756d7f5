"""`slackwater doctor`: what a host can do."""

import typer
from rich.table import Table

from slackwater.cli.options import Json
from slackwater.cli.outcome import DATA_ERROR, err, out, print_json


def doctor(json: Json = False) -> None:
    """Say what this host can do: transports, descriptors, memory, the bus server."""
    from slackwater.common.transport.negotiate import probe

    found = probe()
    if json:
        print_json(found)
        return
    table = Table()
    for column in ("transport", "here", "why"):
        table.add_column(column)
    for item in found:
        table.add_row(item.kind, "yes" if item.usable else "no", item.why)
    out.print(table)
    if not any(item.usable for item in found):
        err.print("no transport works on this host")
        raise typer.Exit(DATA_ERROR)
