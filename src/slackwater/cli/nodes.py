"""`slackwater nodes`: the machines that run jobs, and what they have to give."""

from collections import Counter
from typing import Final

from slackwater.cli.show import with_client
from slackwater.console import tables
from slackwater.console.options import Json, Url
from slackwater.console.outcome import err, out, print_json
from slackwater.console.sizes import human
from slackwater.console.tables import Row
from slackwater.schemas.cluster import NodeInfo

HEADS: Final = ("NODE", "STATE", "GPUS", "SLOTS", "JOBS", "CORES", "MEMORY", "RACK")
FAULT: Final = "FAULT"
"""Head of the notes of nodes whose GPUs have faults."""


def nodes(url: Url = None, json: Json = False) -> None:
    """List worker nodes: what each has, and what jobs hold of it.

    STATE: ready, cordoned (it takes no more jobs), or lost (not heard).
    GPUS: of each type, those that jobs hold, of how many.
    SLOTS: processes of jobs without GPUs, of how many may run.
    CORES, MEMORY: what its jobs may be given together.
    RACK: the rack that it says it stands in.
    FAULT: GPUs that no job is given, and why.
    """
    infos = with_client(url, lambda client: client.nodes())
    if json:
        print_json(infos)
    elif not infos:
        err.print("There are no worker nodes; `slackwater run worker` adds one.", markup=False)
    else:
        tables.show(node_table(infos, out.width if out.is_terminal else None))


def node_table(infos: tuple[NodeInfo, ...], width: int | None) -> list[str]:
    ordered = sorted(infos, key=lambda info: tables.natural(info.heartbeat.node))
    faulty = any(gpu.fault for info in infos for gpu in info.heartbeat.gpus)
    return tables.lines(
        HEADS, [_node(each) for each in ordered], width, note=FAULT if faulty else ""
    )


def _node(info: NodeInfo) -> Row:
    beat = info.heartbeat
    cells = (
        beat.node,
        "lost" if not info.alive else "cordoned" if beat.cordoned else "ready",
        gpu_text(info),
        f"{info.slots_used}/{beat.slots}",
        str(info.jobs),
        f"{beat.cores:g}" if beat.cores else "",
        human(beat.memory_bytes) if beat.memory_bytes else "",
        beat.rack,
    )
    faults = (f"GPU {gpu.index}: {gpu.fault}" for gpu in beat.gpus if gpu.fault)
    return Row(cells, "; ".join(faults))


def gpu_text(info: NodeInfo) -> str:
    """Show GPUs by type: `V100 3/4, T4 0/2`."""
    used, there = Counter[str](), Counter[str]()
    for gpu in info.heartbeat.gpus:
        there[gpu.type] += 1
        used[gpu.type] += gpu.id in info.gpus_used
    return ", ".join(f"{kind} {used[kind]}/{number}" for kind, number in there.items())
