"""Parameters reach a trial's program, and its values are read whole, whatever is around them."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackwater import tune
from slackwater.common.base.errors import Rejected
from slackwater.tune.values import PARAMETERS, Told, environment, told

values = st.lists(st.tuples(st.integers(0, 10**9), st.floats(-1e9, 1e9)), max_size=8)
noise = st.lists(st.text(alphabet="abc :=.\t", max_size=20), max_size=8)


def printed_by(capsys: pytest.CaptureFixture[str], pairs: list[tuple[int, float]]) -> bytes:
    for step, value in pairs:
        tune.report(value, step)
    return capsys.readouterr().out.encode()


def test_values_are_read_as_they_were_told(capsys: pytest.CaptureFixture[str]) -> None:
    pairs = [(0, 0.5), (1, 1e-300), (2, -3.0), (3, 1e22)]
    text = b"epoch 1\n" + printed_by(capsys, pairs) + b"done\n"
    found, read = told(text)
    assert found == [Told(*pair) for pair in pairs]
    assert read == len(text)


@given(values, noise, st.integers(1, 50))
def test_a_log_read_in_pieces_tells_the_same(
    pairs: list[tuple[int, float]], around: list[str], size: int
) -> None:
    lines = [f"slackwater.tune: step={step} value={value!r}" for step, value in pairs]
    text = "".join(f"{line}\n" for line in (*around, *lines)).encode()
    found, offset, end = [], 0, 0
    while end < len(text):
        end = min(len(text), end + size)
        new, read = told(text[offset:end])
        found += new
        offset += read
    assert found == [Told(*pair) for pair in pairs]


def test_a_line_that_is_not_ours_is_left_out() -> None:
    text = b"slackwater.tune: step=1 value=much\nslackwater.tune: step=2 value=nan\n"
    assert told(text) == ([], len(text))
    assert told(b"slackwater.tune: step=1 value=0.5") == ([], 0), "it is not whole yet"


def test_parameters_reach_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"rate": 0.1, "layers": 2, "name": "sgd", "flag": True}
    monkeypatch.delenv(PARAMETERS, raising=False)
    assert tune.parameters() == {}
    monkeypatch.setenv(PARAMETERS, environment(given)[PARAMETERS])
    assert tune.parameters() == given
    for damaged in ("{", json.dumps([1])):
        monkeypatch.setenv(PARAMETERS, damaged)
        with pytest.raises(Rejected, match="unset it"):
            tune.parameters()


@pytest.mark.parametrize(("value", "step"), [(float("nan"), 0), (float("inf"), 0), (0.5, -1)])
def test_a_value_that_could_not_be_read_is_refused(value: float, step: int) -> None:
    with pytest.raises(Rejected, match="give a finite one"):
        tune.report(value, step)
