"""The options that many commands have."""

from typing import Annotated

import typer

Url = Annotated[
    str | None,
    typer.Option(help="The bus to talk to, for example nats://127.0.0.1:4222."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
