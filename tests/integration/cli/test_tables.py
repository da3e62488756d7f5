"""Table of mistyped command lines: the command, its exit code, and its error message.

2 is a wrong command line, 65 wrong input data, 69 nobody there, 78 a wrong configuration.
"""

import os
from pathlib import Path

import pytest
from tests.unit.cli.commands import PROGRAMS

from slackwater.console.program import answered
from slackwater.loadgen.samples import PHILLY

pytestmark = pytest.mark.live
CLOSED = "nats://127.0.0.1:9"
JOB = "slackwater submit --id a"
EMULATED = f"{JOB} --model vgg19"
REPLAY = f"loadgen replay {PHILLY}"
CONFIGURE = "slackwater model configure --instances 1e6 --batch 1000 --model-bytes 2e8"
RULE = "give letters, digits, - and _"


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the lines name, in an environment that knows no cluster."""
    for name in os.environ:
        if name.startswith(("SLACKWATER_", "NATS_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    files = {
        "b.json": '{"id": "b", "program": ["true"]}',
        "unknown.json": '{"id": "a", "worker": 3}',
        "type.json": '{"id": "a", "workers": "two"}',
        "no.json": "{",
        "port.toml": 'id = "m1"\nmetrics_port = 70000\n',
        "typo.toml": 'id = "m1"\nagregators_max = 3\n',
        "nan.toml": 'id = "m1"\ntick_s = nan\n',
        "minus.toml": 'id = "m1"\ntick_s = -1\n',
        "id.toml": 'id = "a b"\n',
        "text.toml": 'id = "m1"\naggregators_max = "many"\n',
        "broken.toml": "id = \n",
        "bare.toml": f'id = "a1"\nurl = "{CLOSED}"\n',
        "file": "",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "latin.toml").write_bytes(b'id = "\xff"\n')
    return tmp_path


def said(words: list[str], capfd: pytest.CaptureFixture[str]) -> tuple[int, str]:
    try:
        code = answered(PROGRAMS[words[0]], words[1:], words[0])
    except SystemExit as end:  # A service's own main.
        code = end.code if isinstance(end.code, int) else 1
    text = capfd.readouterr().err
    assert "Traceback" not in text
    assert text.count("\n") == 1, text
    return code, text


@pytest.mark.parametrize(
    ("line", "code", "answer"),
    [
        # The choice of a cluster.
        ("slackwater jobs", 69, "no cluster is known: start one with `slackwater up`, or give"),
        (f"slackwater jobs --url {CLOSED}", 69, f"no nats-server answers at {CLOSED}"),
        (f"slackwater jobs --url {CLOSED}", 69, "start one there (`slackwater up` starts one"),
        ("slackwater jobs --url nats://127.0.0.1:99999", 78, "99999"),
        ("slackwater jobs --state foo", 2, "'foo'"),
        ("slackwater jobs --state RUNNING", 2, "running"),
        # Jobs by id.
        ("slackwater cancel a.b", 2, RULE),
        ("slackwater logs a.b", 2, RULE),
        ("slackwater events a.b", 2, RULE),
        ("slackwater wait a.b", 2, RULE),
        ("slackwater job >", 2, RULE),
        ("slackwater job *", 2, RULE),
        # Submissions.
        ("slackwater submit --model vgg19 --workers 0", 2, "--workers '0': give a whole number "),
        (f"{EMULATED} --workers 65", 2, "--workers '65': give a whole number from 1 to 64"),
        (f"{EMULATED} --workers 2.5", 2, "--workers '2.5': give a whole number from 1 to 64"),
        (f"{EMULATED} --iterations=-5", 2, "--iterations '-5': give a whole number from 1 to"),
        (f"{EMULATED} --iterations {'9' * 20}", 2, "--iterations '99999999999999999999': give a"),
        (f"{EMULATED} --seed {'9' * 23}", 2, "give a whole number from 0 to 9,007,199,254,740,"),
        (f"{EMULATED} --compute-s nan", 2, "--compute-s 'nan': give a number from 0 to 86,400"),
        (f"{EMULATED} --compute-s inf", 2, "--compute-s 'inf': give a number from 0 to 86,400"),
        (f"{EMULATED} --compute-s=-1", 2, "--compute-s '-1': give a number from 0 to 86,400"),
        (f"{EMULATED} --bytes-scale nan", 2, "--bytes-scale 'nan': give a number from 0 to 1"),
        (f"{EMULATED} --bytes-scale 2", 2, "--bytes-scale '2': give a number from 0 to 1"),
        (f"{EMULATED} --bytes-scale 0", 2, "--bytes-scale 0: give a number above 0"),
        (f"{EMULATED} --staleness 3", 2, "--staleness 3: a synchronous job has none; add"),
        (f"{EMULATED} --consistency eventual", 2, "'eventual': give one of synchronous, asyn"),
        (f"{EMULATED} --tenant {'x' * 65}", 2, "a name has at most 64 characters, this one 65"),
        (f"{JOB} --model vgg20", 2, "vgg19"),
        (JOB, 2, "nothing to submit: give -- COMMAND, JOB_FILE or --model NAME"),
        (f"{EMULATED} --folder /tmp", 2, "--folder beside --model vgg19: it runs no prog"),
        (f"{EMULATED} --allow-fractional-share", 2, "beside --model vgg19: an emulated job may"),
        (f"{JOB} --compute-s 1 -- true", 2, "-- COMMAND beside --compute-s: it says that itself"),
        (f"{JOB} --file b.json --workers 3", 2, "b.json beside --workers: it says that itself"),
        (f"{JOB} --file b.json --model vgg19", 2, "b.json beside --model: it says that itself"),
        (f"{JOB} --file b.json -- true", 2, "b.json beside -- COMMAND: it says that itself"),
        (f"{JOB} --file b.json", 2, "--id a: b.json says id b; use one id"),
        (f"{JOB} --file none.json", 65, "none.json: no such file"),
        (f"{JOB} --file .", 65, ".: Is a directory"),
        (f"{JOB} --file no.json", 65, "no.json: not JSON"),
        (f"{JOB} --file type.json", 65, "workers = 'two': give a whole number from 1 to 64"),
        (f"{JOB} --file unknown.json", 65, "unknown key worker; the nearest is workers"),
        # Configurations.
        ("slackwater run nosuch --config x.toml", 2, "give one of master, controller"),
        ("slackwater run master --config none.toml", 78, "none.toml: No such file or directory"),
        ("slackwater run master --config .", 78, ".: Is a directory"),
        ("slackwater run master --config typo.toml", 78, "the nearest is aggregators_max"),
        ("slackwater run master --config port.toml", 78, "metrics_port = 70000: give a whole num"),
        ("slackwater run master --config nan.toml", 78, "tick_s = nan: give a number above 0"),
        ("slackwater run master --config minus.toml", 78, "tick_s = -1: give a number above 0"),
        ("slackwater run master --config id.toml", 78, f"id = 'a b': {RULE}"),
        ("slackwater run master --config text.toml", 78, "aggregators_max = 'many': give a whole"),
        ("slackwater run master --config broken.toml", 78, "broken.toml: not TOML"),
        ("slackwater run master --config latin.toml", 78, "latin.toml: not TOML"),
        ("slackwater config check --service aggregator bare.toml", 78, "set shm_path, or state_d"),
        ("slackwater config check file", 2, "file does not say whose it is: add --service"),
        # Draining.
        ("slackwater drain a1 --within=-1", 2, "--within '-1': give a number from 1 to 86,400"),
        ("slackwater drain a1 --within nan", 2, "--within 'nan': give a number from 1 to 86,400"),
        ("slackwater drain a1 --within 1e9", 2, "--within '1e9': give a number from 1 to 86,400"),
        ("slackwater drain a1 --cancel --wait", 2, "--cancel, --wait: they exclude each other"),
        ("slackwater drain a.b", 2, f"AGGREGATOR 'a.b': {RULE}"),
        # Replays.
        (f"slackwater up --aggregators {2**31}", 2, "give a whole number from 1 to 1,024"),
        (f"slackwater up --controllers {2**63}", 2, "give a whole number from 1 to 256"),
        (f"slackwater up --lenders {2**31}", 2, "give a whole number from 0 to 4,096"),
        (f"{REPLAY} --aggregators {2**63}", 2, "give a whole number from 1 to 1,024"),
        (f"{REPLAY} --controllers {2**63}", 2, "give a whole number from 1 to 256"),
        (f"{REPLAY} --window 5000", 2, "--window '5000': give a whole number from 2 to 4,096"),
        ("loadgen experiment sharing --window 5000", 2, "a whole number from 2 to 4,096"),
        (f"loadgen simulate {PHILLY} --nodes {2**31}", 2, "a whole number from 1 to 65,536"),
        (f"loadgen simulate {PHILLY} --gpus-per-node {2**31}", 2, "number from 1 to 65,536"),
        (f"loadgen simulate {PHILLY} --nodes-max {2**31}", 2, "number from 0 to 65,536"),
        (f"loadgen simulate {PHILLY} --processes {2**31}", 2, "number from 0 to 1,024"),
        (f"loadgen simulate {PHILLY} --cluster {2**31}x4", 2, "at most 65536 of each"),
        (f"loadgen simulate {PHILLY} --cluster {'9' * 5000}x4", 2, "write NODESxGPUS"),
        ("loadgen generate lin --set jobs=99999999999", 65, "give 1 to 5000000"),
        (f"{CONFIGURE} --machines {2**31}", 2, "give a whole number from 0 to 100,000"),
        (f"{CONFIGURE} --machine {2**31}x.1:1e9 --machine 1x.2:1e9", 2, "at most 100,000 of a"),
        (f"slackwater model throughput --worker-s 1 --workers {2**31}", 2, "from 0 to 100,000"),
        (f"slackwater logs a --tail {2**31}", 2, "a whole number from -1 to 1,000,000"),
        ("slackwater up --policy foo", 2, "--policy 'foo': choose one of cyclic, edf, packed, st"),
        ("slackwater up --detach --policy foo", 2, "--policy 'foo': choose one of cyclic, edf"),
        (f"{REPLAY} --time-scale nan", 2, "must be above 0"),
        (f"{REPLAY} --time-scale 0", 2, "must be above 0"),
        (f"{REPLAY} --policy foo", 2, "--policy 'foo': choose"),
        (f"{REPLAY} --transport foo", 2, "--transport 'foo': choose shm, verbs, tcp or auto"),
        (f"{REPLAY} --transport tcp --url {CLOSED}", 2, "cannot be forced on a running cluster"),
        (f"{REPLAY} --bytes-scale 0", 2, "must be above 0"),
        ("loadgen experiment sharing --time-scale -1", 2, "must be above 0"),
        ("loadgen experiment caring", 2, "experiment 'caring': choose sharing"),
        ("loadgen experiment sharing --policy static", 2, "it is the baseline"),
        (f"{REPLAY} --nodes 2", 2, "--nodes starts a cluster of its own: give --gpu-policy"),
        ("loadgen experiment fidelity --gpu-policy foo", 2, "--gpu-policy foo: choose fifo, srsf"),
        ("loadgen experiment fidelity --time-scale 1/0", 2, "must be above 0"),
        (f"{REPLAY} --jobs 0", 2, "--jobs '0': give a whole number of at least 1"),
        (f"{REPLAY} --report file/report", 65, "Not a directory; name another"),
        ("loadgen replay none.csv", 65, "none.csv"),
        ("loadgen replay b.json", 65, "b.json"),
        ("loadgen simulate none.csv", 65, "none.csv"),
        (f"loadgen simulate {PHILLY} --policy foo", 2, "there is no policy 'foo'; choose one of"),
        (f"loadgen simulate {PHILLY} --mode foo", 2, "--mode foo: choose one of"),
        ("loadgen generate nosuch", 65, "nosuch"),
        # Not a path, not a number, not a cluster's part.
        ("slackwater memory evict s1", 2, "nothing to evict: name slabs, or give --count"),
        ("slackwater memory map a.b --url BUS", 2, "device 'a.b': a name has letters, digits"),
        ("slackwater model throughput --worker-s abc", 2, "abc"),
        ("slackwater compile everything", 2, "part 'everything': choose pages, folds"),
        # A bus without services.
        ("slackwater jobs --url BUS", 69, "no master answers (sw.v1.cmd.master.main.list: nobody"),
        ("slackwater jobs --url BUS", 69, "start one with `slackwater run master`, or a whole"),
        ("slackwater drain a1 --cancel --url BUS", 69, "no master answers"),
    ],
)  # fmt: skip
def test_a_line_its_exit_code_and_its_answer(
    line: str, code: int, answer: str, bus: str, capfd: pytest.CaptureFixture[str]
) -> None:
    found = said(line.replace("BUS", bus).split(), capfd)
    assert found[0] == code, found[1]
    assert answer in found[1]


@pytest.mark.parametrize("id", ["a b", "x" * 64, "ünï", "../etc", "a.b", "", "_epoch", "a\n"])
def test_an_id_that_cannot_be_one(id: str, capfd: pytest.CaptureFixture[str]) -> None:
    code, text = said(["slackwater", "submit", "--id", id, "--model", "vgg19"], capfd)
    assert code == 2
    assert text.startswith("error: --id ")
    assert RULE in text


def test_a_program_without_a_name(capfd: pytest.CaptureFixture[str]) -> None:
    code, text = said(["slackwater", "submit", "--id", "a", "--", ""], capfd)
    assert (code, "the program's name is empty" in text) == (2, True)


def test_a_report_that_cannot_be_written_is_said_before_anything_is_measured(
    nowhere: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A folder that is there and takes no file, also from root: /proc."""
    code, text = said([*REPLAY.split(), "--report", "/proc/self"], capfd)
    assert code == 65
    assert "/proc/self" in text
