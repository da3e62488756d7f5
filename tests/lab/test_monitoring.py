"""Prometheus over the lab's cluster: the role's files, its rules, the queries of the dashboard."""

import json
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.lab.conftest import IGNORED
from tests.lab.lab import ANSIBLE, Lab
from tests.lab.load import Load

pytestmark = [pytest.mark.lab, pytest.mark.timeout(600), IGNORED]
FILES = ANSIBLE / "roles/slackwater_monitoring/files"
WITHOUT = {"Facts a second", "Refusals a second", "Core seconds that sharing saved"}
"""Panels that may be empty on a cluster that just began."""


def test_promtool_takes_the_rules(lab: Lab, tmp_path: Path) -> None:
    shutil.copy(FILES / "rules.yml", tmp_path)
    shutil.copy(Path(__file__).with_name("alerts.yml"), tmp_path)
    for words in (["check", "rules", "rules.yml"], ["test", "rules", "alerts.yml"]):
        done = subprocess.run(
            ["promtool", *words], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def prometheus(lab: Lab, load: Load, tmp_path: Path) -> Iterator[str]:
    """Prometheus on this machine, by the files of the role, over the lab's services."""
    inventory = lab.inventory.read_text()
    local = "[monitoring]\nwatch ansible_connection=local ansible_host=127.0.0.1\n"
    lab.inventory.write_text(inventory.replace("[monitoring]\n", local))
    try:
        lab.play(
            "site.yml", "--limit", "watch,localhost",
            slackwater_monitoring_folder=str(tmp_path), slackwater_monitoring_service=False,
        )  # fmt: skip
    finally:
        lab.inventory.write_text(inventory)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                "prometheus", f"--config.file={tmp_path}/prometheus.yml",
                f"--storage.tsdb.path={tmp_path}/data", f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log, stderr=log,
        )  # fmt: skip
    yield f"http://127.0.0.1:{port}"
    process.terminate()
    process.wait(20)


def query(url: str, expr: str) -> list[Any]:
    words = urllib.parse.urlencode({"query": expr})
    with urllib.request.urlopen(f"{url}/api/v1/query?{words}", timeout=10) as answer:
        found = json.load(answer)
    assert found["status"] == "success", found
    result: list[Any] = found["data"]["result"]
    return result


def test_every_query_of_the_dashboard_has_an_answer(
    lab: Lab, load: Load, prometheus: str, measured: list[str]
) -> None:
    dashboard = json.loads((FILES / "dashboard.json").read_text())
    queries = {
        panel["title"]: panel["targets"][0]["expr"]
        for panel in dashboard["panels"] if panel["type"] != "row"
    }  # fmt: skip
    until_s = time.monotonic() + 90.0
    empty = set(queries)
    while empty - WITHOUT and time.monotonic() < until_s:
        time.sleep(3.0)
        empty = {title for title in empty if not answered(prometheus, queries[title])}
    assert empty <= WITHOUT
    up = query(prometheus, 'up{job="slackwater"}')
    assert all(each["value"][1] == "1" for each in up), up
    measured.append(f"Prometheus: {len(up)} services, {len(queries)} queries, {len(empty)} empty")


def answered(url: str, expr: str) -> bool:
    try:
        return bool(query(url, expr))
    except OSError:  # It has not come up.
        return False
