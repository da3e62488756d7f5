"""`slackwater completion`: what a shell needs to complete commands, options and values."""

import sys
from typing import Annotated, Literal

import typer
from typer.completion import get_completion_script  # type: ignore[attr-defined]

from slackwater.console.options import Json
from slackwater.console.outcome import print_json
from slackwater.console.program import complete_variable

Shell = Literal["bash", "zsh", "fish"]


def completion(
    context: typer.Context,
    shell: Annotated[Shell, typer.Argument(help="The shell to complete in.")],
    json: Json = False,
) -> None:
    """Print a shell's completion script.

    Bash: `source <(slackwater completion bash)` in ~/.bashrc. Zsh: the same in ~/.zshrc, after
    compinit. Fish: `slackwater completion fish > ~/.config/fish/completions/slackwater.fish`.
    """
    name = context.find_root().info_name or "slackwater"
    script = get_completion_script(
        prog_name=name, complete_var=complete_variable(name), shell=shell
    )
    if json:
        print_json({"shell": shell, "script": script})
    else:
        sys.stdout.write(script + "\n")
