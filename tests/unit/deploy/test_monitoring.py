"""Rules and dashboard of Prometheus: they ask for series that services have."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from slackwater.common.shell.metrics import FAMILIES

FILES = Path(__file__).resolve().parents[3] / "deploy/ansible/roles/slackwater_monitoring/files"
RULES: list[dict[str, Any]] = yaml.safe_load((FILES / "rules.yml").read_text())["groups"][0][
    "rules"
]
PANELS = [
    panel
    for panel in json.loads((FILES / "dashboard.json").read_text())["panels"]
    if panel["type"] != "row"
]
RECORDED = {rule["record"] for rule in RULES if "record" in rule}
ASKED = [(rule.get("alert") or rule["record"], rule["expr"]) for rule in RULES] + [
    (panel["title"], panel["targets"][0]["expr"]) for panel in PANELS
]


def known(series: str) -> bool:
    name = series.removeprefix("slackwater_")
    return name in FAMILIES or re.sub(r"_(bucket|sum|count)$", "", name) in FAMILIES


@pytest.mark.parametrize(("what", "expr"), ASKED, ids=[what for what, _ in ASKED])
def test_each_series_is_one_that_services_have(what: str, expr: str) -> None:
    asked = set(re.findall(r"slackwater[:_][\w:]+", expr))
    plain = {each for each in asked if ":" not in each}
    assert [each for each in plain if not known(each)] == []
    assert asked - plain <= RECORDED
    labels = set(re.findall(r"(?:by \(|, )(\w+)(?=[,)])", expr)) - {"le"}
    own = {label for each in plain for label in labels_of(each)}
    assert labels <= own | {"service", "id", "machine", "instance"}


def labels_of(series: str) -> tuple[str, ...]:
    name = series.removeprefix("slackwater_")
    family = FAMILIES.get(name) or FAMILIES[re.sub(r"_(bucket|sum|count)$", "", name)]
    return tuple(family.labels)


def test_each_alert_says_what_it_is_and_what_to_do() -> None:
    alerts = [rule for rule in RULES if "alert" in rule]
    assert len(alerts) >= 15
    for alert in alerts:
        assert alert["labels"]["severity"] in ("page", "ticket"), alert["alert"]
        assert len(alert["annotations"]["summary"].split()) >= 3, alert["alert"]
        assert len(alert["annotations"]["remedy"].split()) >= 3, alert["alert"]


def test_panels_do_not_lie_over_one_another() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in PANELS:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
