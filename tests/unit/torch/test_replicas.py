"""One process is one replica on one node, wherever a service or torchrun says that it is."""

import pytest

from slackwater.common.domains.models.adaptive_batch import Decision
from slackwater.torch.replicas import Replicas


def test_one_process_agrees_with_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLACKWATER_JOB", "digits")
    monkeypatch.setenv("SLACKWATER_ATTEMPT", "4")
    replicas = Replicas()
    decision = Decision(8, 1, 1.5, 0.75)
    assert replicas.agree(decision, 8) == (decision, 8)
    assert replicas.mean(3.0) == 3.0
    assert (replicas.rank, replicas.number, replicas.job, replicas.attempt) == (0, 1, "digits", 4)


@pytest.mark.parametrize(
    ("environment", "nodes"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "2"}, 2),
        ({"LOCAL_WORLD_SIZE": "3"}, 2),
        ({"LOCAL_WORLD_SIZE": "4"}, 1),
        ({"SLACKWATER_GPUS": "a:1,b:2,c:1", "LOCAL_WORLD_SIZE": "4"}, 3),
    ],
)
def test_nodes_are_what_the_service_says_or_else_torchrun(
    environment: dict[str, str], nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLACKWATER_GPUS", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    replicas = Replicas()
    replicas.number = 4
    assert replicas.nodes == nodes
