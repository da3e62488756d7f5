"""`slackwater policy list`, which needs no cluster."""

import json

import pytest
from tests.unit.cli.commands import PROGRAMS

from slackwater.console.program import answered
from slackwater.services.master.gpu_policy import live_policies


def test_every_policy_of_a_running_cluster_is_listed_with_what_it_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The guide named this command before there was one."""
    assert answered(PROGRAMS["slackwater"], ("policy", "list", "--json"), "slackwater") == 0
    listed = json.loads(capsys.readouterr().out)
    assert [each["policy"] for each in listed] == live_policies()
    for each in listed:
        assert each["does"].endswith("."), each
    (las,) = [each for each in listed if each["policy"] == "tiresias-las"]
    assert las["options"]["limits"] == "3600,57600"
    assert answered(PROGRAMS["slackwater"], ("policy", "list"), "slackwater") == 0
    heads, *rows = capsys.readouterr().out.splitlines()
    assert heads.split() == ["POLICY", "IT", "DOES", "OPTIONS"]
    assert [row.split()[0] for row in rows] == live_policies()
