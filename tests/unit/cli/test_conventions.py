"""Conventions that hold for every command: -h, help without an argument, the version, one line for
what was mistyped, JSON for scripts."""

from importlib.metadata import version
from typing import Any

import pytest
from tests.unit.cli.commands import ALL, LEAVES, PROGRAMS

from slackwater.console.program import answered

WORDS = [words for words, _ in ALL]
NO_JSON = {
    ("slackwater", "run"),
    ("slackwater", "bus", "watch"),  # The service's own log is JSON lines.
    ("loadgen", "generate"),  # A trace is CSV.
}

COUNTS_NOTHING = {
    "count", "jobs", "limit", "max_gpus", "min_gpus", "rank", "seed", "servers",
    "prefetch",  # Checked with the device's other options.
}  # fmt: skip
"""Whole numbers that the parser does not bound: they cut what is there, or enter a formula."""


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = answered(PROGRAMS[words[0]], words[1:], words[0])
    done = capsys.readouterr()
    return code, done.out, done.err


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_help_is_asked_for_by_h_too(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    short, long = said(capsys, *words, "-h"), said(capsys, *words, "--help")
    assert short == long
    assert short[0] == 0
    assert f"Usage: {' '.join(words)} " in " ".join(short[1].split())


@pytest.mark.parametrize(
    "words", [words for words, command in ALL if hasattr(command, "list_commands")], ids=" ".join
)
def test_a_group_without_a_command_shows_its_help(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(capsys, *words) == said(capsys, *words, "--help")


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_version(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, program, "--version") == (0, f"{program} {version('slackwater')}\n", "")


@pytest.mark.parametrize(
    "command", [command for _, command in LEAVES], ids=[" ".join(w) for w, _ in LEAVES]
)
def test_a_number_that_something_is_made_of_is_bounded(command: Any) -> None:
    """`slackwater up --lenders 2147483648` took 16 GB before it failed."""
    for param in command.params:
        kind = param.type_descriptor
        if kind.annotation is int and param.name not in COUNTS_NOTHING:
            assert kind.parameter_info.max is not None, param.name


@pytest.mark.parametrize("words", [words for words, _ in LEAVES], ids=" ".join)
def test_every_command_answers_in_json_on_request(words: tuple[str, ...]) -> None:
    command = dict(LEAVES)[words]
    options = {option for param in command.params for option in param.opts}
    assert ("--json" in options) != (words in NO_JSON)


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_an_unknown_option_is_named_with_the_help_to_read(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = said(capsys, *words, "--jsno")
    assert (code, out) == (2, "")
    assert err.startswith("error: there is no option '--jsno'")
    assert err.endswith(f"see `{' '.join(words)} --help`\n")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("slackwater submits", "there is no command 'submits'; the nearest is submit; see"),
        ("slackwater run mistress", "SERVICE 'mistress': give one of master, controller"),
        ("slackwater job", "JOB is missing; see `slackwater job --help`"),
        ("slackwater job a --jsn", "there is no option '--jsn'; the nearest is --json"),
        ("slackwater completion", "SHELL is missing: give one of bash, zsh, fish"),
        ("slackwater submit --workers 65", "--workers '65': give a whole number from 1 to 64"),
        ("slackwater submit --workers 2.5", "--workers '2.5': give a whole number from 1 to 64"),
        ("slackwater submit --iterations=-5", "--iterations '-5': give a whole number "),
    ],
)
def test_a_mistyped_line_gets_one_sentence(
    line: str, answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = said(capsys, *line.split())
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"error: {answer}")


@pytest.mark.parametrize("word", ["a\0b", "b\udce9"])
def test_what_is_not_text_is_a_usage_error(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = said(capsys, "slackwater", "job", word)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "argument 2 is not UTF-8 text" in err
