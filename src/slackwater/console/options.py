"""The options that many commands have."""

from pathlib import Path
from typing import Annotated

import typer

from slackwater.common.base import limits
from slackwater.schemas.base import COUNT_MAX

Url = Annotated[
    str | None,
    typer.Option(help="The bus to talk to, for example nats://127.0.0.1:4222."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
Seed = Annotated[
    int,
    typer.Option(min=0, max=COUNT_MAX, help="Seed of all random draws; equal seeds repeat a run."),
]
Window = Annotated[
    int,
    typer.Option(min=2, max=limits.WINDOW_ITERATIONS_MAX, help="Iterations of a monitor window."),
]
Report = Annotated[
    Path, typer.Option("--report", metavar="FOLDER", help="Write the report to this folder.")
]
