"""A search over real jobs: digits, a few learning rates, bad trials cancelled on the way."""

import sys
from pathlib import Path

import optuna
import pytest

from slackwater import tune
from slackwater.common.base.errors import ConfigRejected
from slackwater.common.embedded import ClusterOptions, EmbeddedCluster
from slackwater.common.shell.client import connect
from slackwater.schemas.jobs import JobSpec

pytestmark = pytest.mark.live

TRIAL = """
import time
import numpy as np
from sklearn.datasets import load_digits
from slackwater import tune

rate = tune.parameters()["rate"]
digits = load_digits()
images, labels = digits.data / 16.0, np.eye(10)[digits.target]
weights = np.random.default_rng(1).normal(0.0, 0.1, (64, 10))
for epoch in range(12):
    logits = images @ weights
    found = np.exp(logits - logits.max(axis=1, keepdims=True))
    found /= found.sum(axis=1, keepdims=True)
    weights -= rate * images.T @ (found - labels) / len(images)
    tune.report(float((found.argmax(axis=1) == digits.target).mean()), epoch)
    time.sleep(0.3 if rate < 1e-3 else 0.0)  # A look comes by while it trains.
if rate > 50.0:
    raise SystemExit("this rate is not to be had")
"""


def suggest(trial: optuna.Trial) -> dict[str, float]:
    return {"rate": trial.suggest_float("rate", 1e-6, 100.0, log=True)}


async def test_trials_are_jobs_and_bad_ones_are_cancelled(tmp_path: Path) -> None:
    """Six trials, two at once, of rates that are told beforehand: the best is found, one that
    learns nothing is pruned and its job cancelled, one that fails fails alone."""
    script = tmp_path / "trial.py"
    script.write_text(TRIAL)
    pruner = optuna.pruners.ThresholdPruner(lower=0.12, n_warmup_steps=2)
    study = optuna.create_study(direction="maximize", pruner=pruner)
    for rate in (0.2, 2.0, 1e-6, 90.0, 0.5, 0.4):
        study.enqueue_trial({"rate": rate})
    job = JobSpec(id="t", workers=1, program=(sys.executable, str(script)))
    options = ClusterOptions(controllers=1, aggregators=1)
    async with EmbeddedCluster(options) as cluster:
        from slackwater.tune.study import _search

        await _search(study, suggest, job, 6, 2, cluster.url)
        async with connect(cluster.url, "test") as client:
            records = {record.spec.id: record for record in await client.jobs()}
    states = [trial.state.name for trial in study.trials]
    assert states[3] == "FAIL"
    assert states.count("COMPLETE") >= 4
    assert study.best_params["rate"] == 2.0
    assert study.best_value > 0.85
    assert {trial.user_attrs["job"] for trial in study.trials} == set(records)
    slow = study.trials[2]
    assert (slow.state.name, records["t-2"].state) == ("PRUNED", "cancelled")
    assert records["t-3"].state == "failed"
    assert len(study.trials[1].intermediate_values) == 12


def test_numbers_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigRejected, match="0 trials, 4 at once"):
        tune.optimize(optuna.create_study(), suggest, JobSpec(id="t"), trials=0)
