"""`slackwater memory export`: serve a block device from the idle memory of other machines."""

import asyncio
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slackwater.common.base.logging import configure
from slackwater.common.shell.config import DEFAULT_METRICS_ADDRESS
from slackwater.console.options import Json, Url
from slackwater.console.outcome import out, print_json, reported
from slackwater.console.sizes import human, size_bytes
from slackwater.console.where import credentials, resolve

if TYPE_CHECKING:
    from slackwater.memory.service.assembly import DeviceAssembly

NetworkInterface = Annotated[
    str, typer.Option(help="The interface to other machines, where there are several.")
]
NetworkBytes = Annotated[
    str, typer.Option(help="Budget of its link, as 1G; by default what it can carry.")
]
MetricsPort = Annotated[
    int, typer.Option(min=-1, max=65_535, help="Port of metrics; 0: none, -1: any free one.")
]
MetricsAddress = Annotated[
    str, typer.Option(help="Address of this machine that the metrics port is opened on.")
]


def export(
    size: Annotated[str, typer.Option(help="Bytes of the device, for example 64G.")],
    socket: Annotated[Path, typer.Option(help="Unix socket that NBD clients connect to.")],
    backup: Annotated[
        Path | None, typer.Option(help="The file behind it [default: SOCKET.backup].")
    ] = None,
    id: Annotated[str, typer.Option(help="The device's name on the bus.")] = "d1",
    node: Annotated[str, typer.Option(help="This machine, not borrowed from.")] = "",
    slab_size: Annotated[str, typer.Option(help="Bytes of a slab; by default the lenders'.")] = "0",
    resilience: Annotated[
        str, typer.Option(help="How pages outlive a lender: disk, 8+2 (k + r coding) or 2-copies.")
    ] = "disk",
    hot: Annotated[float, typer.Option(help="Page I/O per second that maps a slab.")] = 20.0,
    cold: Annotated[float, typer.Option(help="Page I/O per second that unmaps a slab.")] = 0.0,
    direct: Annotated[bool, typer.Option(help="Keep the backup out of the page cache.")] = False,
    swap: Annotated[bool, typer.Option(help="Serve this machine's own swap.")] = False,
    transport: Annotated[str | None, typer.Option(help="Use only shm, tcp or verbs.")] = None,
    prefetch: Annotated[
        int, typer.Option(help="Requests that a scan fetches ahead over tcp or verbs; 0: none.")
    ] = 8,
    network_interface: NetworkInterface = "",
    network_bytes_s: NetworkBytes = "0",
    metrics_port: MetricsPort = 0,
    metrics_address: MetricsAddress = DEFAULT_METRICS_ADDRESS,
    url: Url = None,
    json: Json = False,
) -> None:
    """Serve a block device until Ctrl-C."""
    with reported():  # Kernels are defined, for which there must be a cache.
        from slackwater.memory.service.export import export as serve
        from slackwater.memory.service.options import DeviceOptions

    options = DeviceOptions(
        id=id,
        size_bytes=size_bytes(size, "--size"),
        socket=socket.absolute(),
        backup=(backup or socket.with_name(f"{socket.name}.backup")).absolute(),
        node=node,
        slab_bytes=size_bytes(slab_size, "--slab-size"),
        resilience=resilience,
        hot=hot,
        cold=cold,
        direct=direct or swap,
        swap=swap,
        transport=transport,
        prefetch=prefetch,
        network_interface=network_interface,
        network_bytes_s=size_bytes(network_bytes_s, "--network-bytes-s"),
        metrics_port=metrics_port,
        metrics_address=metrics_address,
        token=os.environ.get("SLACKWATER_CLUSTER_TOKEN", ""),
    )

    with reported():
        import uvloop

        configure(id=id, service="device")  # Standard output is the answer's.
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            ready = partial(_say_ready, json=json)
            runner.run(serve(options, resolve(url), ready, credentials()))


def _say_ready(assembly: "DeviceAssembly", json: bool) -> None:
    options = assembly.options
    uri = f"nbd+unix:///?socket={options.socket}"
    if json:
        print_json({"uri": uri, "backup": str(options.backup), "size_bytes": options.size_bytes})
    else:
        out.print(f"device {options.id}: {human(options.size_bytes)} at {uri}", soft_wrap=True)
        out.print(f"backup file {options.backup}", soft_wrap=True)
