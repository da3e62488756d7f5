"""The operator's guide names every verb that a service answers."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SHELLS = {path.parent.name: path for path in (ROOT / "services").glob("*/shell.py")} | {
    "device": ROOT / "src/slackwater/memory/service/control_service.py"
}


def verbs(source: str) -> list[str]:
    """The keys of `endpoints={...}`, or of the ENDPOINTS that it names, in their order."""
    tree = ast.parse(source)
    tables = [
        keyword.value
        for call in ast.walk(tree)
        if isinstance(call, ast.Call)
        for keyword in call.keywords
        if keyword.arg == "endpoints"
    ] + [
        each.value
        for each in tree.body
        if isinstance(each, ast.AnnAssign) and ast.unparse(each.target) == "ENDPOINTS"
    ]
    return [
        key.value
        for table in tables
        if isinstance(table, ast.Dict)
        for key in table.keys
        if isinstance(key, ast.Constant) and isinstance(key.value, str)
    ]


def test_the_table_of_requests_is_what_the_services_declare() -> None:
    text = (ROOT / "docs/guide/operator.md").read_text()
    section = text.split("## What goes over the bus\n")[1].split("\nFacts, ")[0]
    rows = re.findall(r"^\| `(\w+)\.[^`]*` \| `([^`]*)` \|$", section, flags=re.M)
    declared = {service: verbs(path.read_text()) for service, path in SHELLS.items()}
    assert {service: names.split() for service, names in rows} == {
        service: names for service, names in declared.items() if names
    }
