"""Configuration files: what is wrong is named with its file, key and value, and nothing passes."""

import tomllib
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackwater.common.base.errors import ConfigRejected
from slackwater.common.shell.config import ServiceConfig, load_config, write_config


class Inner(msgspec.Struct, kw_only=True, frozen=True):
    depth: int = 1


class Config(ServiceConfig, kw_only=True, frozen=True):
    share: Annotated[float, msgspec.Meta(gt=0)] = 0.1
    hosts: tuple[str, ...] = ()
    inner: Inner = Inner()


def _load(tmp_path: Path, text: str) -> Config:
    path = tmp_path / "c.toml"
    path.write_text(text)
    return load_config(path, Config)


def test_a_good_file(tmp_path: Path) -> None:
    config = _load(tmp_path, 'id = "a1"\nshare = 1\nhosts = ["x"]\n[inner]\ndepth = 3\n')
    assert (config.id, config.share, config.hosts, config.inner.depth) == ("a1", 1.0, ("x",), 3)
    assert config.url == "nats://127.0.0.1:4222"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('id = "a"\nshrae = 1.0', "unknown key shrae; the nearest is share"),
        ('id = "a"\n[inner]\ndept = 1', "unknown key inner.dept; the nearest is inner.depth"),
        ('id = "a"\nshare = "big"', "share = 'big': give a number above 0"),
        ('id = "a"\nshare = -1.0', "share = -1.0: give a number above 0"),
        (
            'id = "a"\nmetrics_port = 1.5',
            "metrics_port = 1.5: give a whole number from -1 to 65,535",
        ),
        ('id = "a"\nhosts = ["x", 2]', "hosts[1] = 2: give a text"),
        ('id = "a.b"', "id = 'a.b': give letters, digits, - and _"),
        ('id = "a"\nlog_level = "loud"', "log_level = 'loud': give one of 'debug', 'error', "),
        ("share = 1.0", "key id is missing"),
        ("id = ", "not TOML"),
        ('id = "a"\nid = "b"', "not TOML"),
    ],
)
def test_a_wrong_file_is_one_line_with_the_remedy(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(ConfigRejected) as refusal:
        _load(tmp_path, text)
    said = str(refusal.value)
    assert str(tmp_path / "c.toml") in said
    assert expected in said
    assert "\n" not in said


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigRejected, match="is the path right"):
        load_config(tmp_path / "none.toml", Config)


_text = st.text(st.characters(exclude_categories=("Cs",)), max_size=30)
_values = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    _text,
    st.lists(_text, max_size=3),
    st.dictionaries(_text, _text, max_size=3),
)


@given(st.dictionaries(_text, _values, max_size=5))
def test_what_is_written_is_read_back(tmp_path_factory: Any, values: dict[str, Any]) -> None:
    path = tmp_path_factory.mktemp("config") / "c.toml"
    write_config(path, values)
    assert tomllib.loads(path.read_text(encoding="utf-8")) == values
