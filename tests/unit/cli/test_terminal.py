"""Leaving a terminal by `~.`, and terminals that cannot be had."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from slackwater.cli.commands import app
from slackwater.cli.terminal import Escape

PIECES = st.lists(st.text("~.ab\r\n", max_size=5).map(str.encode), max_size=8)


def by_reading_all(typed: bytes) -> tuple[bytes, bool]:
    """Do the same with all of it in hand, line by line."""
    left = re.search(rb"(?:^|(?<=[\r\n]))~\.", typed)
    typed = typed[: left.start()] if left else typed
    return re.sub(rb"(^|(?<=[\r\n]))~~", b"~", typed), left is not None


@given(PIECES)
def test_a_tilde_and_a_point_at_the_beginning_of_a_line_leave(pieces: list[bytes]) -> None:
    escape, passed, left = Escape(), b"", False
    for piece in pieces:
        found, left = escape.passed(piece)
        passed += found
        if left:
            break
    typed = b"".join(pieces)
    expected, leaves = by_reading_all(typed)
    assert left == leaves
    held = not left and re.search(rb"(?:^|[\r\n])~\Z", typed) is not None
    assert passed + b"~" * held == expected, "a tilde at the end waits for what comes"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--pty", "--", "bash"), "--pty: this is not a terminal"),
        (("--pty", "--workers", "2", "--", "bash"), "leave --workers out"),
        (("--pty", "--restarts", "1", "--", "bash"), "leave --restarts out"),
        (("--pty", "--json", "--", "bash"), "leave --json out"),
        (("--pty",), "nothing to run: the command comes after --"),
    ],
)
def test_a_terminal_that_cannot_be_had_is_refused(words: tuple[str, ...], said: str) -> None:
    done = CliRunner().invoke(app, ["launch", *words])
    assert done.exit_code == 2
    assert said in " ".join(done.output.split())
