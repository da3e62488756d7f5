"""`slackwater config`: samples of configuration files, and what is wrong with one."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from slackwater.cli.config_file import (
    SERVICES,
    Sampled,
    Service,
    config_type,
    faults,
    sample,
    sample_job,
    service_of,
)
from slackwater.cli.job_file import job_schema
from slackwater.common.base.errors import ConfigRejected
from slackwater.console.options import Json
from slackwater.console.outcome import CONFIG_ERROR, Usage, err, out, print_json, reported
from slackwater.console.program import group

app = group("Check configuration files, and print samples of them and of job files.")


@app.command()
def check(
    file: Annotated[Path, typer.Argument(help="A service's TOML file.")],
    service: Annotated[
        Service | None,
        typer.Option(
            help="The service that reads it, where neither the file nor its name says so."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Check a service's configuration file: print every wrong key with its line and a remedy.

    For example: `slackwater config check /etc/slackwater/master.toml`. Exit code 78 if any is
    wrong.
    """
    with reported():
        text = _text(file)
        whose = service or service_of(text, file.stem)
        if whose is None:
            raise Usage(f"{file} does not say whose it is: add --service {'|'.join(SERVICES)}")
        found = faults(text, config_type(whose))
    if json:
        print_json({"file": str(file), "service": whose, "faults": found})
    for fault in () if json else found:
        place = f"{file}:{fault.line}" if fault.line else str(file)
        key = f"{fault.key}: " if fault.key else ""
        err.print(f"error: {place}: {key}{fault.why}", markup=False)
    if found:
        raise typer.Exit(CONFIG_ERROR)
    if not json:
        out.print(f"{file}: good for a {whose}", markup=False, highlight=False, soft_wrap=True)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigRejected(f"{file}: {error.strerror}; is the path right?") from error
    except UnicodeDecodeError as error:
        raise ConfigRejected(f"{file}: not UTF-8: {error}") from error


@app.command(name="sample")
def print_sample(
    what: Annotated[
        Sampled, typer.Argument(help="The service that will read it, or job for a job file.")
    ],
    json: Json = False,
) -> None:
    """Print a configuration file, or a job file, with every key, its purpose, bounds and default.

    For example: `slackwater config sample master > /etc/slackwater/master.toml`, or `slackwater
    config sample job > job.toml` for `slackwater submit job.toml`.
    """
    text = sample_job() if what == "job" else sample(what)
    if json:
        print_json({"service": what, "sample": text})
    else:
        sys.stdout.write(text)


@app.command()
def schema(
    what: Annotated[Literal["job"], typer.Argument(help="The kind of file.")] = "job",
    json: Json = False,
) -> None:
    """Print the JSON schema of a job file, which `slackwater submit JOB_FILE` reads."""
    text = msgspec.json.format(msgspec.json.encode(job_schema()), indent=0 if json else 2)
    sys.stdout.write(text.decode() + "\n")
