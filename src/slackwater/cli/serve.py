"""`slackwater run`: one service in the foreground."""

import runpy
import sys
from pathlib import Path
from typing import Annotated

import typer

from slackwater.cli.config_file import Service


def serve(
    service: Annotated[Service, typer.Argument(help="The service to run.")],
    config: Annotated[
        Path,
        typer.Option(help="The service's TOML file; `slackwater config sample` prints one."),
    ],
) -> None:
    """Run one service in the foreground, as systemd does."""
    sys.argv = [f"slackwater run {service}", "--config", str(config)]
    runpy.run_module(f"slackwater.services.{service}", run_name="__main__")
