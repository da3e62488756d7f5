"""Small traces, speeds and profiles that the recorded simulations read, made from fixed seeds.

Every number comes from whole-number draws and plain arithmetic, so that the files have equal bytes
on every machine.
"""

import json
from pathlib import Path
from random import Random

MODELS = ("vgg19", "resnet50", "alexnet", "googlenet")
STAGES = ((90, 30, 10), (20, 70, 40), (30, 20, 80), (100, 5, 5))
"""Milliseconds of an iteration on GPU, CPU and network, by model."""
TENANTS = ("red", "green", "blue")
PATTERNS = ("1", "2", "3", "4", "11", "12", "22", "44")
"""Placements that the made-up applications were measured on: GPUs of each machine."""
EPOCHS = 5


def write_inputs(folder: Path) -> None:
    """Write `mixed.csv`, `burst.csv`, `elastic.csv`, `speeds.json` and `profiles/` to `folder`."""
    mixed = _jobs(Random(11), jobs=48, gap_s=240, longest_s=9000)
    (folder / "mixed.csv").write_text(mixed)
    (folder / "burst.csv").write_text(_jobs(Random(12), jobs=36, gap_s=1, longest_s=1200))
    (folder / "elastic.csv").write_text(_elastic(Random(13), jobs=14))
    speeds = {"": {"t4": 0.5, "v100": 1.0}, "vgg19": {"v100": 1.0}, "alexnet": {"t4": 0.8}}
    (folder / "speeds.json").write_text(json.dumps(speeds))
    write_profiles(folder / "profiles")


def _jobs(rng: Random, jobs: int, gap_s: int, longest_s: int) -> str:
    lines = [
        "job_id,submit_s,gpus,duration_s,model,tenant,iterations,batch_size,iteration_s,stages_s,"
        "priority"
    ]
    at_s = 0
    for number in range(jobs):
        at_s += rng.randrange(2 * gap_s)
        kind = rng.randrange(len(MODELS))
        gpus = (1, 1, 1, 2, 2, 4, 4, 8)[rng.randrange(8)]
        duration_s = 30 + rng.randrange(longest_s) // (1 + 3 * (number % 3))
        gpu, cpu, network = STAGES[kind]
        period_ms = gpu + cpu + network
        lines.append(
            f"j{number},{at_s},{gpus},{duration_s},{MODELS[kind]},{TENANTS[rng.randrange(3)]},"
            f"{1000 * duration_s // period_ms},64,{period_ms / 1000},"
            f"gpu={gpu / 1000};cpu={cpu / 1000};network={network / 1000},{rng.randrange(3)}"
        )
    return "\n".join(lines) + "\n"


def _elastic(rng: Random, jobs: int) -> str:
    """Jobs of the two made-up applications, which know batch sizes and no durations."""
    lines = ["job_id,submit_s,gpus,model,tenant,batch_size,priority"]
    at_s = 0
    for number in range(jobs):
        at_s += rng.randrange(300)
        model, batch = (("small", 400), ("large", 256))[rng.randrange(2)]
        gpus = (1, 2, 4)[rng.randrange(3)]
        lines.append(f"e{number},{at_s},{gpus},{model},{TENANTS[number % 3]},{batch},{number % 2}")
    return "\n".join(lines) + "\n"


def write_profiles(folder: Path, epoch: int = 6000) -> None:
    """Write the two applications; `epoch`: their epochs' length in iterations of M0."""
    _profiles(folder / "small", step=20, batches=(100, 400, 1600), epoch=epoch)
    _profiles(folder / "large", step=60, batches=(64, 256, 1024), epoch=epoch)


def _profiles(folder: Path, step: int, batches: tuple[int, ...], epoch: int) -> None:
    """One application: a step costs a constant, a term by batch and one by machines and GPUs."""
    folder.mkdir(parents=True)

    def row(nodes: int, gpus: int, per_gpu: int) -> str:
        sync = 0 if gpus == 1 else (10 + gpus if nodes == 1 else 40 + 3 * gpus)
        return f"{per_gpu},{(step + per_gpu + sync) / 1000},{sync / 1000}"

    sizes = (20, 40, 80, 160)
    columns = "local_bsz,step_time,sync_time"
    placements = [f"placement,{columns}"] + [
        f"{pattern},{row(len(pattern), sum(map(int, pattern)), size)}"
        for pattern in PATTERNS
        for size in sizes
    ]
    (folder / "placements.csv").write_text("\n".join(placements))
    scalability = [f"num_nodes,num_replicas,{columns}"] + [
        f"{nodes},{gpus},{row(nodes, gpus, size)}"
        for nodes, gpus in ((8, 16), (8, 32), (16, 16), (16, 64))
        for size in sizes
    ]
    (folder / "scalability.csv").write_text("\n".join(scalability))
    for batch in batches:
        lines = ["progress,iteration,metric,grad_sqr,grad_var"]
        lines += [f"{e * epoch},{e * epoch},0.5,1.0,{3 + e}" for e in range(1, EPOCHS + 1)]
        (folder / f"validation-{batch}.csv").write_text("\n".join(lines))
