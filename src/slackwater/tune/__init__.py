"""Hyper-parameter search whose trials are jobs of the cluster (Qiao, thesis, section 3.5.5).

    study = optuna.create_study(direction="maximize")               # in your script
    tune.optimize(study, suggest, JobSpec(id="t", workers=1, program=("python", "train.py")),
                  trials=20, at_once=4)

    def suggest(trial: optuna.Trial) -> dict[str, float | int | str | bool]:
        return {"rate": trial.suggest_float("rate", 1e-4, 1.0, log=True)}

    values = tune.parameters()                                      # in train.py
    tune.report(accuracy, step=epoch)

Optuna (the extra `tune`) chooses parameters and says which trials are not worth their time; these
are cancelled. The cluster's policy decides on how many GPUs each trial runs: under Pollux the GPUs
that a trial leaves go to those that make most of them. `report` and `parameters` need nothing but
this package.
"""

from typing import TYPE_CHECKING, Any

from slackwater.tune.values import parameters, report

if TYPE_CHECKING:
    from slackwater.tune.study import optimize

__all__ = ["optimize", "parameters", "report"]


def __getattr__(name: str) -> Any:
    """Load the search when it is used: a trial's program needs none of it."""
    if name == "optimize":
        from slackwater.tune.study import optimize

        return optimize
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
