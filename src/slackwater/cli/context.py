"""`slackwater context`: clusters by name, as kubectl and the NATS CLI have them."""

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from slackwater.client import contexts
from slackwater.client.contexts import LOCAL, Context
from slackwater.common.bus.access import shown
from slackwater.console import tables
from slackwater.console.options import Json
from slackwater.console.outcome import err, out, print_json, reported
from slackwater.console.program import group
from slackwater.console.tables import Row

app = group("Name clusters, with the user that you are there, and choose the one that is used.")
_Name = Annotated[str, typer.Argument(metavar="CONTEXT", help="The context's name.")]
_File = Annotated[Path | None, typer.Option(metavar="FILE")]


@app.command("ls")
def list_contexts(json: Json = False) -> None:
    """List contexts; a star marks the one in use."""
    with reported():
        found = contexts.read()
    if json:
        print_json([_document(name, each, name == found.selected) for name, each in _all(found)])
    elif not found.contexts:
        err.print("There are no contexts: slackwater context add NAME --url URL", markup=False)
    else:
        rows = [
            Row(("*" if name == found.selected else "", name, shown(each.url), _who(each)),
                each.description)
            for name, each in _all(found)
        ]  # fmt: skip
        width = out.width if out.is_terminal else None
        tables.show(tables.lines(("", "CONTEXT", "URL", "USER"), rows, width, note="DESCRIPTION"))


@app.command()
def use(name: _Name, json: Json = False) -> None:
    """Use a context from now on; `local` for the clusters of this machine."""
    with reported():
        found = contexts.read()
        if name != LOCAL:
            found.find(name)
        contexts.write(msgspec.structs.replace(found, selected="" if name == LOCAL else name))
    what = "the clusters of this machine" if name == LOCAL else f"context {name}"
    _say(f"commands use {what} from now on", {"selected": name}, json)


@app.command()
def add(
    name: _Name,
    url: Annotated[str, typer.Option(help="The bus's address, as tls://bus.example:4222.")],
    user: Annotated[str, typer.Option(help="Your user of the bus.")] = "",
    password: Annotated[str, typer.Option(help="That user's password, kept in the file.")] = "",
    token: Annotated[str, typer.Option(help="A token, instead of a user.")] = "",
    creds: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A .creds file of NATS.")
    ] = None,
    nkey: Annotated[Path | None, typer.Option(metavar="FILE", help="An nkey seed file.")] = None,
    ca: Annotated[
        Path | None, typer.Option("--tlsca", metavar="FILE", help="Trust these authorities (PEM).")
    ] = None,
    certificate: Annotated[
        Path | None, typer.Option("--tlscert", metavar="FILE", help="Show this certificate.")
    ] = None,
    key: Annotated[
        Path | None, typer.Option("--tlskey", metavar="FILE", help="The certificate's key.")
    ] = None,
    description: Annotated[str, typer.Option(help="A word about the cluster.")] = "",
    json: Json = False,
) -> None:
    """Make a context, or replace the one of that name."""
    files = {"creds": creds, "nkey": nkey, "ca": ca, "certificate": certificate, "key": key}
    with reported():
        contexts.check_name(name)
        made = Context(
            url=url, user=user, password=password, token=token, description=description,
            **{field: str(path.absolute()) for field, path in files.items() if path is not None},
        )  # fmt: skip
        made.identity.options()  # Says what cannot be used, before it is kept.
        found = contexts.read()
        contexts.write(msgspec.structs.replace(found, contexts={**found.contexts, name: made}))
    text = f"context {name} is kept; `slackwater context use {name}` selects it"
    _say(text, _document(name, made, name == found.selected), json)


@app.command()
def rm(name: _Name, json: Json = False) -> None:
    """Forget a context."""
    with reported():
        found = contexts.read()
        found.find(name)
        left = {each: context for each, context in found.contexts.items() if each != name}
        selected = "" if found.selected == name else found.selected
        contexts.write(contexts.Contexts(selected=selected, contexts=left))
    _say(f"context {name} is forgotten", {"forgotten": name}, json)


def _say(text: str, document: dict[str, Any], json: bool) -> None:
    if json:
        print_json(document)
    else:
        out.print(text, markup=False, highlight=False, soft_wrap=True)


def _all(found: contexts.Contexts) -> list[tuple[str, Context]]:
    return sorted(found.contexts.items(), key=lambda item: tables.natural(item[0]))


def _who(context: Context) -> str:
    return context.user or next(
        (kind for kind in ("token", "creds", "nkey") if getattr(context, kind)), ""
    )


def _document(name: str, context: Context, selected: bool) -> dict[str, Any]:
    """Describe a context without its secrets."""
    fields = {"url": shown(context.url), "user": context.user, "description": context.description}
    return {"name": name, "selected": selected, "by": _who(context), **fields}
