"""Options of `slackwater submit`, by what they are about."""

from pathlib import Path
from typing import Annotated, Final, Literal

import typer

from slackwater.schemas.base import CORES_MAX, COUNT_MAX, GPUS_MAX
from slackwater.schemas.jobs import GRACE_S_MAX, PRIORITY_MAX, Consistency

SECONDS_MAX: Final = 86_400
_RESOURCES: Final = "What it needs of its nodes"
_ACCOUNT: Final = "Whose turn it is"
_STOPS: Final = "When it is stopped, or fails"
_AGGREGATORS: Final = "Training through aggregators"
_EMULATION: Final = "An emulation, instead of a program"

Id = Annotated[
    str,
    typer.Option(
        help="The job's id; by default one is made. Submitting an id again changes nothing."
    ),
]
JobFile = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="JOB_FILE",
        help="A job as YAML, TOML or JSON, see `slackwater config sample job`; a command that each "
        "rank runs comes after -- instead.",
    ),
]
Folder = Annotated[
    Path | None,
    typer.Option(
        "--folder",
        "--cwd",
        metavar="FOLDER",
        help="Run the program in this folder of its node; by default the present one.",
    ),
]
Workdir = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Send this folder's code to the nodes, and run the program in a copy of it.",
    ),
]
VenvFolder = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Send this virtual environment to the nodes, and run the program in it.",
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        help="Emulate the training of this network, for example vgg19.", rich_help_panel=_EMULATION
    ),
]
File = Annotated[
    Path | None,
    typer.Option(
        help="Read the job from this file, as JOB_FILE; JSON, if its name has another ending."
    ),
]
Processes = Annotated[
    int,
    typer.Option(
        min=1, max=64, help="Number of processes, one per rank.", rich_help_panel=_RESOURCES
    ),
]
Servers = Annotated[
    int,
    typer.Option(
        min=1,
        max=64,
        help="Parameter servers that the job would reserve for itself.",
        rich_help_panel=_AGGREGATORS,
    ),
]
Iterations = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=COUNT_MAX,
        help="Iterations of training; an emulation has 100 by default, a program counts itself.",
        rich_help_panel=_AGGREGATORS,
    ),
]
ComputeS = Annotated[
    float | None,
    typer.Option(
        min=0,
        max=SECONDS_MAX,
        help="Seconds of computing per iteration, with --model; by default the network's own.",
        rich_help_panel=_EMULATION,
    ),
]
BytesScale = Annotated[
    float,
    typer.Option(
        min=0,
        max=1,
        help="Share of the network's real bytes, with --model.",
        rich_help_panel=_EMULATION,
    ),
]
Mode = Annotated[
    Consistency,
    typer.Option(
        help="When a gradient is applied, and whom a worker waits for.",
        rich_help_panel=_AGGREGATORS,
    ),
]
Staleness = Annotated[
    int,
    typer.Option(
        min=0,
        max=1000,
        help="Iterations that a worker may be ahead of the slowest, if stale-synchronous.",
        rich_help_panel=_AGGREGATORS,
    ),
]
Restarts = Annotated[
    int,
    typer.Option(
        min=0,
        max=1000,
        help="Restarts of ranks that die, in all; each continues at the job's iteration.",
        rich_help_panel=_STOPS,
    ),
]
Tenant = Annotated[
    str,
    typer.Option(
        help="The tenant on whose account it runs, for example vision.", rich_help_panel=_ACCOUNT
    ),
]
Fractional = Annotated[
    bool,
    typer.Option(
        "--allow-fractional-share",
        help="Let a program that really trains use aggregators of less than a core.",
        rich_help_panel=_ACCOUNT,
    ),
]
LossLimit = Annotated[
    float,
    typer.Option(
        min=0,
        max=0.999,
        help="Part of its speed that sharing may cost; 0: the tenant's or cluster's limit.",
        rich_help_panel=_ACCOUNT,
    ),
]
Together = Annotated[
    Literal["", "node", "rack"],
    typer.Option(
        "--within",
        metavar="LEVEL",
        help="Wait until all its GPUs are idle on one node, or in one rack: node or rack.",
    ),
]
Gpus = Annotated[
    int,
    typer.Option(
        min=0,
        max=GPUS_MAX,
        help="GPUs of the whole job, given all together; by default it has a process on each.",
        rich_help_panel=_RESOURCES,
    ),
]
WorkersMin = Annotated[
    int,
    typer.Option(
        min=0,
        max=64,
        help="The fewest workers that it may be scaled to.",
        rich_help_panel=_RESOURCES,
    ),
]
WorkersMax = Annotated[
    int,
    typer.Option(
        min=0,
        max=64,
        help="The most workers that it may be scaled to.",
        rich_help_panel=_RESOURCES,
    ),
]
GpusMin = Annotated[
    int,
    typer.Option(
        min=0, max=GPUS_MAX, help="The fewest GPUs that it can run on.", rich_help_panel=_RESOURCES
    ),
]
GpusMax = Annotated[
    int,
    typer.Option(
        min=0, max=GPUS_MAX, help="The most GPUs that it can use.", rich_help_panel=_RESOURCES
    ),
]
GpuTypes = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TYPE[=SPEED]",
        help="A type that it can run on, with its relative speed, as V100=2.5; may be repeated.",
        rich_help_panel=_RESOURCES,
    ),
]
CoresEach = Annotated[
    float,
    typer.Option(
        min=0,
        max=CORES_MAX,
        help="Cores of CPU that each process needs.",
        rich_help_panel=_RESOURCES,
    ),
]
MemoryEach = Annotated[
    str,
    typer.Option(
        help="Memory that each process needs, for example 8G. An elastic program keeps to it.",
        rich_help_panel=_RESOURCES,
    ),
]
After = Annotated[
    list[str] | None,
    typer.Option(
        metavar="JOB",
        help="Start once this job has completed (if it fails, this one is cancelled); repeatable.",
        rich_help_panel=_ACCOUNT,
    ),
]
AfterAny = Annotated[
    bool,
    typer.Option(
        "--after-any",
        help="Start once those of --after have ended, however.",
        rich_help_panel=_ACCOUNT,
    ),
]
ArrayOf = Annotated[
    str,
    typer.Option(
        "--array",
        metavar="NUMBERS",
        help="Submit a job for each number, as 0-9 or 0-99%4 (four at a time), which finds it as "
        "ARRAY_INDEX and in place of {index}.",
        rich_help_panel=_ACCOUNT,
    ),
]
Preferred = Annotated[
    int,
    typer.Option(
        min=-PRIORITY_MAX,
        max=PRIORITY_MAX,
        help="Priority: of jobs that wait, higher ones come first, where the policy knows it; "
        "elastic jobs without GPUs give them slots.",
        rich_help_panel=_ACCOUNT,
    ),
]
Batch = Annotated[
    str,
    typer.Option(
        metavar="MIN[:MAX]",
        help="Examples of one iteration over all processes, and up to how many it may grow; "
        "`128:fixed` keeps it.",
        rich_help_panel=_RESOURCES,
    ),
]
Adaptive = Annotated[
    bool,
    typer.Option(
        "--adaptive/--fixed",
        help="Let its number of GPUs change while it runs.",
        rich_help_panel=_RESOURCES,
    ),
]
Preemptible = Annotated[
    bool,
    typer.Option(
        "--preemptible/--no-preemptible",
        help="Let a policy pause it in favour of other jobs.",
        rich_help_panel=_ACCOUNT,
    ),
]
Grace = Annotated[
    float,
    typer.Option(
        "--grace",
        min=0,
        max=GRACE_S_MAX,
        help="Seconds from SIGTERM to SIGKILL, to save its state; 0: 30 for a pause, else the "
        "node's setting.",
        rich_help_panel=_STOPS,
    ),
]
Checkpoint = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="The folder in which its program saves checkpoints.",
        rich_help_panel=_STOPS,
    ),
]
From = Annotated[
    Path | None,
    typer.Option(
        "--from",
        metavar="FOLDER",
        help="Begin with the newest that `slackwater checkpoint` saved there.",
        rich_help_panel=_STOPS,
    ),
]
SaveTo = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Have its aggregators, which see that folder, save its parameters and optimiser "
        "states there now and then.",
        rich_help_panel=_STOPS,
    ),
]
SaveEvery = Annotated[
    str,
    typer.Option(
        help="How long it takes until all is saved once, for example 5m, by default 1m; auto: as "
        "follows from how fast it trains and how often aggregators are lost.",
        rich_help_panel=_STOPS,
    ),
]
SaveFraction = Annotated[
    float,
    typer.Option(
        min=0.001,
        max=1,
        help="The part that is saved at a time, so much more often: what changed most.",
        rich_help_panel=_STOPS,
    ),
]
SaveDtype = Annotated[
    Literal["float32", "bfloat16"],
    typer.Option(
        help="How numbers of a part are saved; bfloat16: rounded, twice as much for as many bytes.",
        rich_help_panel=_STOPS,
    ),
]
Env = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME[=VALUE]",
        help="An environment variable of its program; without a value, yours. May be repeated.",
    ),
]
TimeLimit = Annotated[
    str,
    typer.Option(
        help="How long it may run, for example 90m; then it fails. By default no limit.",
        rich_help_panel=_STOPS,
    ),
]
Aggregate = Annotated[
    str,
    typer.Option(
        metavar="WHEN",
        help="Let aggregators add up what PyTorch's DistributedDataParallel exchanges: auto (where "
        "they can), on (or fail), off.",
    ),
]
ByTurns = Annotated[
    bool,
    typer.Option(
        "--by-turns",
        help="Compute, and move bytes, by turns with other such jobs on its nodes: jobs that need "
        "a machine's processors and its network at different times then share it.",
    ),
]
Sharing = Annotated[
    str,
    typer.Option(
        metavar="POLICY",
        help="How it shares aggregators: edf, cyclic, static or another policy; by default as its "
        "cluster does. A job with GPUs is then given them together with aggregators.",
        rich_help_panel=_AGGREGATORS,
    ),
]
HangTimeout = Annotated[
    str,
    typer.Option(
        help="Start it again once it hangs, with no iteration for so long. By default it is told.",
        rich_help_panel=_STOPS,
    ),
]
Wait = Annotated[
    bool,
    typer.Option(
        "--wait",
        help="Print its logs until it ends, and exit with its exit code: 0 if it completed, else "
        "that of the first rank that failed, or 1. Ctrl-C leaves it running.",
    ),
]
