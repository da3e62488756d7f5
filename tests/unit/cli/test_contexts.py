"""Contexts: a file of the account's own, and which cluster a command talks to."""

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slackwater.cli.context import app
from slackwater.client import contexts
from slackwater.client.contexts import Context, Contexts
from slackwater.common.base.errors import ConfigRejected, Rejected
from slackwater.console import where


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in ("SLACKWATER_URL", "NATS_URL", "SLACKWATER_CLUSTER", "SLACKWATER_CONTEXT"):
        monkeypatch.delenv(name, raising=False)


def said(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, words)
    assert result.exit_code == code, result.output
    return result.output


def test_a_context_is_made_used_listed_and_forgotten(tmp_path: Path) -> None:
    key = tmp_path / "seed"
    key.write_text("SUA")
    said("add", "lab", "--url", "tls://bus.lab:4222", "--nkey", str(key), "--description", "three")
    said("add", "home", "--url", "nats://me:secret@127.0.0.1:4222")
    assert contexts.chosen("", {}) is None, "a context that is made is not in use yet"
    said("use", "lab")
    found = contexts.chosen("", {})
    assert found is not None
    assert found.identity.nkey == str(key)
    listed = {each["name"]: each for each in json.loads(said("ls", "--json"))}
    assert listed["lab"]["selected"] is True
    assert listed["lab"]["by"] == "nkey"
    assert listed["home"]["url"] == "nats://127.0.0.1:4222"
    assert "secret" not in said("ls") + said("ls", "--json")
    assert os.stat(contexts.file()).st_mode & 0o777 == 0o600
    said("rm", "lab")
    assert contexts.read().selected == ""
    said("use", "home")
    said("use", "local")
    assert contexts.chosen("", {}) is None


def test_the_nearest_word_wins() -> None:
    one, two = Context(url="nats://one:1"), Context(url="nats://two:2")
    contexts.write(Contexts(selected="one", contexts={"one": one, "two": two}))
    assert contexts.chosen("", {}) == one
    assert contexts.chosen("two", {"SLACKWATER_CONTEXT": "one"}) == two
    assert contexts.chosen("", {"SLACKWATER_CONTEXT": "two"}) == two
    assert contexts.chosen("", {"SLACKWATER_CONTEXT": "local"}) is None
    assert contexts.chosen("", {"SLACKWATER_URL": "nats://three:3"}) is None
    assert contexts.chosen("two", {"SLACKWATER_URL": "nats://three:3"}) == two
    assert where.resolve(None) == "nats://one:1"
    assert where.resolve("nats://four:4") == "nats://four:4"


def test_what_cannot_be_says_what_to_do() -> None:
    assert "no context 'nosuch'" in said("use", "nosuch", code=65)
    assert "slackwater context add x" in said("rm", "x", code=65)
    assert "choose a name" in said("add", "a b", "--url", "nats://x:1", code=65)
    assert "choose a name" in said("add", "local", "--url", "nats://x:1", code=65)
    wrong = said("add", "x", "--url", "nats://x:1", "--creds", "/nosuch", code=78)
    assert "'/nosuch' cannot be found" in wrong
    assert "There are no contexts" in said("ls")
    with pytest.raises(Rejected, match="no context 'gone'; there is none"):
        contexts.chosen("gone", {})
    contexts.file().parent.mkdir(parents=True, exist_ok=True)
    contexts.file().write_text('{"chosen": "x"}')
    with pytest.raises(ConfigRejected, match="mend it, or remove it"):
        contexts.read()
