"""Files that `slackwater up` leaves for its account's commands on the same machine."""

from typing import Annotated, Literal

import msgspec

from slackwater.schemas.base import Count, IdText, Name, Record, Seconds, Text

ClusterPhase = Literal["starting", "ready", "restarting", "ending"]
"""`restarting`: a service of it is not ready."""


class ServiceStatus(Record, kw_only=True, frozen=True):
    """One process of the cluster."""

    name: Name
    state: Name
    pid: Count = 0
    """The process id; 0: it does not run."""
    restarts: Count = 0
    text: Text = ""
    """The process's last line, or why it failed."""


class LocalCluster(Record, kw_only=True, frozen=True):
    """A cluster that this account has on this machine."""

    name: IdText
    pid: Count
    """The process id of its `slackwater up`."""
    state: ClusterPhase = "starting"
    started_s: Seconds
    url: Text = ""
    """The address of its bus, without the token."""
    address_file: Text
    """The file that holds the URL with the token."""
    log_dir: Text
    state_dir: Text = ""
    """The folder of its records; empty: they are removed with it."""
    run_dir: Text = ""
    services: Annotated[tuple[ServiceStatus, ...], msgspec.Meta(max_length=4096)] = ()
