"""Parts that `slackwater` and `loadgen` share: commands that are imported when they are called,
`-h` and `--version` everywhere, and one line for a mistyped command."""

import os
import sys
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from importlib import import_module
from typing import Any, Final

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

from slackwater.console import interrupt, where
from slackwater.console.outcome import FAILED, USAGE, err, logs_to_stderr, reported
from slackwater.console.usage import dressed, sentence, unknown_command

EXIT_CODES: Final = (
    "Exit codes: 0 done, 1 failed, 2 usage, 3 inconclusive, 65 bad input, 69 nobody answers, "
    "75 try later, 78 bad configuration, 130 interrupted."
)


command_path: Final[ContextVar[str]] = ContextVar("command_path", default="slackwater")
"""The command that is being done, with its groups."""


class Group(TyperGroup):
    """Commands of which some are imported when they are asked for. Without one it shows its help.

    `places` maps a command's name to "module:function", or "module:app" for a group.
    """

    places: Mapping[str, str] = {}

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:
            typer.echo(ctx.get_help())
            raise typer.Exit
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: Any) -> list[str]:
        return [*self.places, *super().list_commands(ctx)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        place = self.places.get(cmd_name)
        if place is None:
            found = super().get_command(ctx, cmd_name)
            return found if found is None else dressed(found)
        module, _, name = place.partition(":")
        with interrupt.loading():
            made = getattr(import_module(module), name)
            if not isinstance(made, typer.Typer):
                alone = where.Commands(add_completion=False, pretty_exceptions_enable=False)
                alone.command(cmd_name, cls=getattr(made, "command_class", None))(made)
                made = alone
            command = typer.main.get_command(made)
        command.name = cmd_name
        return dressed(command)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        names = self.list_commands(ctx)
        if args[0] not in names and not args[0].startswith("-") and not ctx.resilient_parsing:
            ctx.fail(unknown_command(args[0], names))
        command_path.set(f"{ctx.command_path} {args[0]}")
        return super().resolve_command(ctx, args)


def group(help: str, cls: type[Group] = Group, **settings: Any) -> typer.Typer:
    """Commands under one name."""
    return where.Commands(
        cls=cls, add_completion=False, pretty_exceptions_enable=False, help=help, **settings
    )


def program(help: str, places: Mapping[str, str]) -> typer.Typer:
    """A whole command line."""
    app = group(
        help,
        type("Program", (Group,), {"places": places}),
        epilog=EXIT_CODES,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(where.identify)
    return app


def complete_variable(name: str) -> str:
    """Name the variable by which a shell's completion script asks the program `name`."""
    return f"_{name.replace('-', '_').upper()}_COMPLETE"


def run(app: typer.Typer, name: str) -> None:
    """Run the program: answer the command line and exit."""
    logs_to_stderr()
    if complete_variable(name) in os.environ:
        from typer.completion import completion_init  # type: ignore[attr-defined]

        completion_init()
    code = answered(app, sys.argv[1:], name)
    interrupt.at_once()  # Nothing is left to be given back but the interpreter.
    sys.exit(code)


def answered(app: typer.Typer, words: Sequence[str], name: str) -> int:
    """Do what `words` say. Returns the exit code."""
    for number, word in enumerate(words, 1):
        if "\0" in word or not _is_text(word):
            err.print(f"error: argument {number} is not UTF-8 text: {ascii(word)[:200]}")
            return USAGE
    try:
        command = dressed(typer.main.get_command(app))
        interrupt.by_exception()
        with reported():  # Options are read before the command.
            code = command.main(list(words), prog_name=name, standalone_mode=False)
    except TyperException as error:
        err.print(f"error: {sentence(error, name)}", markup=False)
        return error.exit_code
    except typer.Exit as end:
        return end.exit_code
    except typer.Abort:
        return FAILED
    except KeyboardInterrupt:  # Before the command, or after it.
        code = interrupt.INTERRUPTED
    if code == interrupt.INTERRUPTED:
        err.print(interrupt.SAID)
    return code if isinstance(code, int) else 0


def _is_text(word: str) -> bool:
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True
