"""`slackwater notify`: a webhook hears what befalls jobs."""

from pathlib import Path
from typing import Annotated

import typer

from slackwater.cli.show import with_client
from slackwater.client import AsyncClient, notifying
from slackwater.client.notifying import DEFAULT, FACTS, Notice
from slackwater.common.base.errors import ConfigRejected
from slackwater.console.options import Json, Url
from slackwater.console.outcome import Usage, noted, out, print_json, reported


def notify(
    to: Annotated[str, typer.Option("--to", metavar="URL", help="Post notices to this webhook.")],
    on: Annotated[
        list[str] | None,
        typer.Option(
            "--on", metavar="FACT", help=f"Tell of this; repeatable. Of: {', '.join(FACTS)}."
        ),
    ] = None,
    job: Annotated[str, typer.Option(metavar="JOB", help="Tell of this job alone.")] = "",
    secret_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Sign each notice by the secret in this file."),
    ] = None,
    state_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Remember here what was told, so that a restart goes on after it."
        ),
    ] = None,
    url: Url = None,
    json: Json = False,
) -> None:
    """Post what befalls jobs to a webhook, as it happens: by default failures and hangs.

    A notice is JSON with `text`, `job`, `fact`, `at_s` and `sequence`: Slack, Mattermost and the
    like show its text. It is sent until it is taken. Ctrl-C ends it.
    """
    wanted = tuple(on or DEFAULT)
    with reported():
        notifying.check_address(to)
        if unknown := [each for each in wanted if each not in FACTS]:
            raise Usage(f"--on {unknown[0]!r}: choose of {', '.join(FACTS)}")
        secret = _secret(secret_file)

    def sent(notice: Notice) -> None:
        if json:
            print_json(notice)
        else:
            out.print(f"told: {notice.text}", markup=False, highlight=False, soft_wrap=True)

    async def tell(client: AsyncClient) -> None:
        noted(f"telling {to.partition('?')[0]} of: {', '.join(wanted)}")
        await notifying.notify(
            client, to, wanted=wanted, job=job, secret=secret, state=state_file, note=noted,
            sent=sent,
        )  # fmt: skip

    with_client(url, tell)


def _secret(file: Path | None) -> bytes:
    if file is None:
        return b""
    try:
        found = file.read_bytes().strip()
    except OSError as error:
        raise ConfigRejected(f"--secret-file {file}: {error.strerror}") from error
    if not found:
        raise ConfigRejected(f"--secret-file {file}: it is empty; put a secret into it")
    return found
