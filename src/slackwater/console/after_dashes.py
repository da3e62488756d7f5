"""Commands that are given another program's command after `--`, whose words are not theirs."""

from typing import Any, Final

from typer.core import TyperCommand

_KEY: Final = "slackwater.after_dashes"


class CommandAfterDashes(TyperCommand):
    """Keeps what stands after `--` apart from its own words; Typer joins both."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else None
        ctx.meta[_KEY] = None if at is None else tuple(args[at + 1 :])
        return super().parse_args(ctx, args[:at])

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND...]"]


def after_dashes(context: Any) -> tuple[str, ...] | None:
    """Return the words after `--`; None: there is none."""
    words: tuple[str, ...] | None = context.meta.get(_KEY)
    return words
