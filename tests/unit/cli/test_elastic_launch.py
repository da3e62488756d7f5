"""`slackwater launch` of an elastic program: its hosts, its id, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from slackwater.cli.elastic_program import bounds, elastic_fields, program_of
from slackwater.console.outcome import Usage


@pytest.mark.parametrize(
    ("given", "found"),
    [("", (2, 8)), ("4", (4, 8)), ("12", (12, 12)), ("2:8", (2, 8)), ("3:3", (3, 3))],
)
def test_bounds(given: str, found: tuple[int, int]) -> None:
    assert bounds(given) == found


@pytest.mark.parametrize("wrong", ["0", "4:2", "1:65", "two", "2:", "-1", "2:8:9"])
def test_wrong_bounds_name_what_to_give(wrong: str) -> None:
    with pytest.raises(Usage, match="for example 2:8"):
        bounds(wrong)


def test_a_program_is_a_file_that_is_there(tmp_path: Path) -> None:
    app = tmp_path / "My app_2.py"
    app.write_text("from slackwater import elastic\n")
    assert program_of([str(app)], "") == ("python", str(app))
    assert program_of(["python", "train.py"], "") is None
    assert program_of([], "") is None
    (tmp_path / "train.py").write_text("import torch\n")
    with pytest.raises(Usage, match=r"not an elastic program.*slackwater launch -- python"):
        program_of([str(tmp_path / "train.py")], "")
    with pytest.raises(Usage, match="is not a file"):
        program_of([str(tmp_path / "other.py")], "")
    broken = tmp_path / "broken.py"
    broken.write_text("from slackwater import elastic\nclass App(\n")
    with pytest.raises(Usage, match=r"broken\.py', line 2: '\(' was never closed"):
        program_of([str(broken)], "")


def test_a_long_name_still_makes_an_id() -> None:
    assert len(elastic_fields(options(words=["x" * 200 + ".py"]), {})["id"]) <= 63


def options(**given: Any) -> dict[str, Any]:
    usual = {"id": "", "workers": None, "gpus": 0, "hosts": "", "restarts": 0, "memory": ""}
    usual |= {"recover": "partial", "save_to": None, "choose_hosts": False}
    return {**usual, "words": ["a/My app_2.py"], **given}


def test_a_program_chooses_where_there_is_a_choice() -> None:
    assert elastic_fields(options(hosts="1:2", choose_hosts=True), {})["choose_hosts"]
    with pytest.raises(Usage, match=r"--choose-hosts: --hosts 1:1 leaves no choice"):
        elastic_fields(options(hosts="1:1", choose_hosts=True), {})


def test_the_job_s_fields() -> None:
    fields = elastic_fields(options(hosts="3:5"), {"A": "1"})
    assert fields["id"] == "my-app-2"
    assert (fields["workers"], fields["workers_min"], fields["workers_max"]) == (3, 1, 5)
    assert fields["consistency"] == "asynchronous"
    assert fields["restarts"] == 100
    assert fields["env"] == {"A": "1"}
    limited = elastic_fields(options(memory="2G"), {"A": "1"})["env"]
    assert limited == {"A": "1", "MALLOC_MMAP_THRESHOLD_": "131072"}
    assert fields["recover"] == "partial"
    back = elastic_fields(options(recover="rollback", save_to=Path("s")), {})
    assert back["recover"] == "rollback"
    with pytest.raises(Usage, match="goes back to what is saved: add --save-to"):
        elastic_fields(options(recover="rollback"), {})
    assert elastic_fields(options(id="x", restarts=2), {})["restarts"] == 2
    for given in ({"workers": 2}, {"gpus": 1}):
        with pytest.raises(Usage, match="has --hosts"):
            elastic_fields(options(**given), {})
