"""What changes the jobs of a cluster."""

from slackwater.cli.options import Json, Url
from slackwater.cli.outcome import out, print_json
from slackwater.cli.show import with_client


def cancel(id: str, url: Url = None, json: Json = False) -> None:
    """Cancel a job: its processes end, its tensors are dropped."""
    with_client(url, lambda client: client.cancel(id))
    if json:
        print_json({"job": id, "cancelled": True})
    else:
        out.print(f"job {id} is cancelled")
