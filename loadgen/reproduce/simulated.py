"""One run of `loadgen simulate` from Python, and the command that does the same."""

from pathlib import Path
from typing import Literal, NamedTuple, TypedDict

from slackwater.loadgen.simulator.gpu.metrics import JobFigures, Summary
from slackwater.loadgen.simulator.gpu.runner import Task, run
from slackwater.loadgen.simulator.options import Options


class Given(TypedDict, total=False):
    """Fields of `Options` that published runs set."""

    trace: str
    seed: int
    start: str
    end: str
    rebase: bool
    nodes: int
    gpus_per_node: int
    overhead: Literal["full", "none"]
    start_s: float
    restart_s: float
    colocate: int
    settings: tuple[str, ...]


class Run(NamedTuple):
    summary: Summary
    figures: list[JobFigures]
    command: str


def simulate(policy: str, given: Given) -> Run:
    options = Options(policies=(policy,), **given)
    words = ["loadgen simulate", Path(options.trace).name, f"--policy {policy}"]
    for name, value in given.items():
        if name == "settings":
            words += [f"--set {text}" for text in options.settings]
        elif name != "trace":
            words.append(f"--{name.replace('_', '-')} {value}")
    report = run(Task(0, options, policy, options.seed))
    return Run(report.summary, report.figures, " ".join(words))
