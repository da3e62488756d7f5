"""How commands are described, and what is said of a mistyped one: our words for the parser's."""

import difflib
import re
from collections.abc import Iterable
from functools import partial
from typing import Any

import typer
from typer.core import TyperArgument, TyperOption
from typer.exceptions import TyperException

from slackwater.common.base.fields import figure
from slackwater.console.outcome import Usage
from slackwater.schemas.base import AN_ID, ID_PATTERN

_SHOWN_CHARS_MAX = 100


def shown(value: object) -> str:
    """Show a typed value in an error: quoted, in one line, cut to a bounded length."""
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= _SHOWN_CHARS_MAX else f"{text[:_SHOWN_CHARS_MAX]}..."


def unknown_command(word: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, [*names], n=1, cutoff=0.5)
    hint = f"; the nearest is {near[0]}" if near else f"; there are {', '.join(names)}"
    return f"there is no command {shown(word)}{hint}"


def sentence(error: TyperException, program: str) -> str:
    """Write one line for a mistake in the command line: what, which value, what to give instead."""
    context = getattr(error, "ctx", None)
    help = f"see `{context.command_path if context else program} --help`"
    return f"{_what(error, context)}; {help}"


def _what(error: TyperException, context: Any) -> str:
    param = getattr(error, "param", None)
    cause = error.__cause__
    if hasattr(error, "possibilities"):
        return _no_option(str(getattr(error, "option_name", "")), context)
    if param is not None and hasattr(error, "param_type"):
        return f"{name_of(param)} is missing{_hint(param)}"
    if param is not None and cause is not None and hasattr(cause, "errors"):
        value = cause.errors(include_url=False)[0]["input"]
        return f"{name_of(param)} {shown(value)}: give {_expected(param)}"
    text = (getattr(error, "message", "") or error.format_message()).rstrip(".")
    return text[:1].lower() + text[1:] if text[1:2].islower() else text


def _no_option(word: str, context: Any) -> str:
    known = [
        option
        for param in (context.command.get_params(context) if context else ())
        for option in param.opts
        if option.startswith("--")
    ]
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"there is no option {shown(word)}" + (f"; the nearest is {near[0]}" if near else "")


def name_of(param: Any) -> str:
    """Name an option as it is typed, and an argument as in the usage line."""
    if isinstance(param, TyperOption):
        return str(max(param.opts, key=len))
    return str(param.metavar or param.name.upper())


def _hint(param: Any) -> str:
    choices = param.type_descriptor.choices
    return f": give {_expected(param)}" if choices else ""


def _expected(param: Any) -> str:
    """Describe the values that `param` takes."""
    kind = param.type_descriptor
    if kind.choices:
        return f"one of {', '.join(str(choice) for choice in kind.choices)}"
    annotation = str(kind.annotation)
    number = "a whole number" if "int" in annotation else "a number"
    if "int" not in annotation and "float" not in annotation:
        return "a path" if kind.is_path else "a text"
    least, most = kind.parameter_info.min, kind.parameter_info.max
    if least is not None and most is not None:
        return f"{number} from {figure(least)} to {figure(most)}"
    if least is not None:
        return f"{number} of at least {figure(least)}"
    if most is not None:
        return f"{number} of at most {figure(most)}"
    return number


def dressed(command: Any) -> Any:
    """Return the same command with its parameters described for people: SECONDS, FILE, N, not
    <float>."""
    for param in command.params:
        if isinstance(param, TyperArgument):
            _dress_argument(param)
        elif isinstance(param, TyperOption) and param.metavar is None:
            if param.is_flag:
                param.metavar = ""
            elif not param.type_descriptor.is_choice:
                param.metavar = _metavar(param)
    made = command.get_help_option

    def help_option(context: Any) -> Any:
        option = made(context)
        if option is not None:
            option.metavar, option.help = "", "Show this help and exit."
        return option

    command.get_help_option = help_option
    return command


def _dress_argument(param: TyperArgument) -> None:
    """Rewrite Typer's {id} and <str>, which say little to others than its users."""
    name = (param.metavar or param.name.rstrip("_").upper()).strip("[]")
    choices = "|".join(map(str, param.type_descriptor.choices or ()))
    usage = (name if param.required else f"[{name}]") + ("..." if param.nargs != 1 else "")
    texts = {
        "display_type_rich": f"<{choices}>" if choices else "",
        "_usage_display_name": usage,
    }
    param.metavar = name
    for method, text in texts.items():
        setattr(param, method, partial(_said, text))


def _said(text: str, *_: Any, **__: Any) -> str:
    return text


def _metavar(param: TyperOption) -> str:
    annotation = str(param.type_descriptor.annotation)
    if param.name.endswith("_s"):
        return "SECONDS"
    if param.type_descriptor.is_path:
        return "FILE"
    if "int" in annotation:
        return "N"
    if "float" in annotation:
        return "NUMBER"
    return re.sub(r"^.*_", "", param.name.rstrip("_")).upper()


def typed(context: typer.Context, name: str) -> bool:
    """Tell whether the parameter stands in the command line: options that would do nothing are
    refused."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def an_id(what: str, value: str) -> None:
    """Refuse a name that no job, aggregator or device can have. Raises Usage."""
    if re.fullmatch(ID_PATTERN, value) is None:
        raise Usage(f"{what} {shown(value)}: give {AN_ID}")


def version(context: typer.Context, wanted: bool) -> None:
    """Print which release this is, and end."""
    if wanted and not context.resilient_parsing:
        from importlib.metadata import version as released

        typer.echo(f"{context.find_root().info_name} {released('slackwater')}")
        raise typer.Exit
