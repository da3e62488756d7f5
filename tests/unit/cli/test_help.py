"""Texts of `--help`: a plain sentence for every command and every option."""

import re

import pytest
from tests.unit.cli.commands import ALL

BANNED = ("Of ", "Who ", "As ", "What ", "Whose ", "Or ", "...", "Else ", "Instead", "The same")
SENTENCES = [
    (f"{' '.join(words)} {param.opts[0] if param.param_type_name == 'option' else param.metavar}",
     param.help or "")
    for words, command in ALL for param in command.params
]  # fmt: skip


def faults(text: str) -> list[str]:
    """Find what keeps a text from being a sentence that a stranger understands."""
    found = []
    if not re.match(r"[A-Z0-9]", text):
        found.append("does not begin with a capital letter")
    if not text.rstrip().endswith((".", "]")) and not text.endswith(")"):
        found.append("does not end with a full stop")
    if text.startswith(BANNED):
        found.append("begins with a word that leads nowhere")
    if len(text.split()) < 3:
        found.append("says too little")
    return found


@pytest.mark.parametrize(("words", "command"), ALL, ids=[" ".join(words) for words, _ in ALL])
def test_every_command_says_what_it_does(words: tuple[str, ...], command: object) -> None:
    help = getattr(command, "help", None) or ""
    first = help.strip().split("\n\n")[0]
    assert faults(first) == [], first


@pytest.mark.parametrize(("option", "help"), SENTENCES, ids=[option for option, _ in SENTENCES])
def test_every_option_is_a_sentence(option: str, help: str) -> None:
    assert faults(help) == [], f"{option}: {help!r}"


def test_no_metavar_is_a_type() -> None:
    """<str> and <float> say nothing; a metavar is a word: SECONDS, FILE, URL."""
    for words, command in ALL:
        for param in command.params:
            shown = (param.metavar or "").strip("[]")
            chosen = param.type_descriptor.is_choice
            assert chosen or shown == "" or re.fullmatch(r"[A-Z_]+(\[?[=:][A-Z]+)?", shown), (
                words,
                shown,
            )
