"""Walks over all commands of both programs."""

from collections.abc import Iterator
from typing import Any

import typer

from slackwater.cli import commands
from slackwater.console.usage import dressed
from slackwater.loadgen.cli import commands as loadgen_commands

PROGRAMS: dict[str, typer.Typer] = {"slackwater": commands.app, "loadgen": loadgen_commands.app}


def walk(program: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command and group of `program`: its words, and itself."""
    root = dressed(typer.main.get_command(PROGRAMS[program]))
    yield (program,), root
    yield from _below((program,), root)


def _below(words: tuple[str, ...], group: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    context = typer.Context(group, info_name=words[-1])
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        yield (*words, name), command
        if hasattr(command, "list_commands"):
            yield from _below((*words, name), command)


ALL = [found for program in PROGRAMS for found in walk(program)]
LEAVES = [(words, command) for words, command in ALL if not hasattr(command, "list_commands")]
