"""`loadgen simulate` and `loadgen audit` as a user meets them: files, tables, refusals."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slackwater.common.base.errors import ConfigRejected, Rejected
from slackwater.loadgen.cli.simulate import app, audit, simulate
from slackwater.loadgen.simulator.options import Options, pairs

TRACE = """job_id,num_gpu,submit_time,iterations,model_name,duration,interval
a,4,0,100,vgg16,900,0
b,2,10,100,resnet50,30,10
c,8,20,100,vgg16,100,10
d,1,20,100,resnet50,400,0
e,2,500,100,vgg19,60,480
"""
FIELDS = {
    "policy", "jobs", "completed", "avg_jct_s", "median_jct_s", "p95_jct_s", "p99_jct_s",
    "makespan_s", "avg_queueing_s", "median_queueing_s", "p95_queueing_s", "gpu_utilization",
    "preemptions", "max_finish_time_fairness", "wasted_gpu_s", "wall_s",
}  # fmt: skip


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "jobs.csv"
    path.write_text(TRACE)
    return path


def options(trace: Path, **more: object) -> Options:
    base = {"trace": str(trace), "nodes": 2, "policies": ("fifo", "tiresias-las")}
    return Options(**{**base, **more})  # type: ignore[arg-type]  # a test's own shorthand


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    return result.exit_code, result.output


def test_a_report_has_everything(trace: Path, tmp_path: Path) -> None:
    folder = tmp_path / "report"
    world = {"restart_s": 5, "seeds": 3, "why_at": (25.0,), "mtbf_s": 5000.0, "repair_s": 50.0}
    assert simulate(options(trace, **world), folder, processes=1) == 0
    summary = json.loads((folder / "summary.json").read_text())
    assert [one["policy"] for one in summary] == ["fifo", "tiresias-las"]
    assert all(set(one) >= FIELDS and one["completed"] == one["jobs"] == 5 for one in summary)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert len(manifest["trace"]["sha256"]) == 64
    assert manifest["options"]["restart_s"] == 5
    assert manifest["knobs"]["tiresias-las"]["limits"] == "3600,57600"
    confidence = json.loads((folder / "confidence.json").read_text())
    assert confidence[0]["seeds"] == 3
    assert confidence[0]["avg_jct_s"]["half_width"] > 0
    assert len((folder / "jobs.csv").read_text().splitlines()) == 1 + 2 * 5
    why = json.loads((folder / "why.json").read_text())
    assert {reason["rule"] for reason in why if reason["policy"] == "fifo"} <= {
        "order", "head-of-line", "capacity",
    }  # fmt: skip
    for name in ("jct-cdf.png", "allocation.png", "fairness-cdf.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
    log = json.loads((folder / "events-fifo.json").read_text())
    assert {event["ph"] for event in log["traceEvents"]} == {"M", "X", "i", "C"}
    assert audit(folder, str(trace)) == 0


def test_the_auditor_says_no(trace: Path, tmp_path: Path) -> None:
    folder = tmp_path / "report"
    simulate(options(trace), folder, processes=1)
    path = folder / "events-fifo.json"
    path.write_text(path.read_text().replace('"gpus":8', '"gpus":9'))
    assert audit(folder) == 1
    with pytest.raises(Rejected, match="holds no event log"):
        audit(tmp_path / "nowhere")


@pytest.mark.slow
def test_equal_bytes_whatever_the_hash_seed_and_the_number_of_processes(
    trace: Path, tmp_path: Path
) -> None:
    program = "import sys; from slackwater.loadgen.cli.simulate import app; app(sys.argv[1:])"
    folders = []
    for hash_seed, processes in (("1", "1"), ("2", "2")):
        folder = tmp_path / f"report-{hash_seed}"
        folders.append(folder)
        subprocess.run(
            [
                sys.executable, "-c", program, "simulate", str(trace), "--nodes", "2",
                "--policy", "srsf", "--policy", "gandiva", "--seeds", "2", "--mtbf-s", "3000",
                "--report", str(folder), "--processes", processes,
            ],
            check=True, capture_output=True, env={**os.environ, "PYTHONHASHSEED": hash_seed},
        )  # fmt: skip
    names = sorted(path.name for path in folders[0].iterdir())
    assert names == sorted(path.name for path in folders[1].iterdir())
    for name in names:
        first, second = ((folder / name).read_bytes() for folder in folders)
        if name == "summary.json":
            first, second = (
                json.dumps([{k: v for k, v in one.items() if k != "wall_s"} for one in each])
                for each in (json.loads(first), json.loads(second))
            )
        assert first == second, name


def test_json_on_the_command_line(trace: Path) -> None:
    code, output = run(
        "simulate", trace, "--policy", "srsf", "--nodes", 2, "--json", "--overhead", "none"
    )
    assert code == 0
    (summary,) = json.loads(output)
    assert summary["policy"] == "srsf"
    assert summary["avg_jct_s"] > 0


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--policy", "best"], 2, "there is no policy 'best'; choose one of best-effort"),
        (["--nodes", 1], 65, "job c asks for 8 GPUs of one type and the cluster has 4"),
        (["--set", "fifo.limits=3"], 2, "'fifo' is neither a policy of this run"),
        (["--set", "tiresias-las.limit=3"], 2, "no option 'limit'; it has limits"),
        (["--set", "tiresias-las.promote_knob=x"], 2, "promote_knob='x': expected float"),
        (["--set", "nonsense"], 2, "write POLICY.OPTION=VALUE"),
        (["--overhead", "half"], 2, "see loadgen simulate --help"),
        (["--overhead", "none", "--restart-s", 30], 2, "makes restarts free"),
        (["--job-model", "magic"], 2, "there is no job model 'magic'"),
        (["--cluster", "4"], 2, "write NODESxGPUS"),
        (["--quotas", "a"], 2, "'a' is not NAME=NUMBER"),
        (
            ["--colocate", 2, "--policy", "tiresias-artifact"],
            2,
            "tiresias-artifact orders no queue",
        ),
        (
            ["--policy", "srsf", "--set", "srsf.colocate_gain=0.3"],
            2,
            "--set srsf.colocate_gain=0.3 says when jobs share GPUs, and with --colocate 0 none",
        ),
        (
            ["--colocate", 2, "--policy", "srsf", "--set", "srsf.colocate_stay=x"],
            2,
            "--set srsf.colocate_stay=x: give a share",
        ),
    ],
)
def test_refusals_are_one_line(
    trace: Path, arguments: list[object], code: int, text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    got, output = run("simulate", trace, "--nodes", 2, *arguments)
    said = output + "".join(capfd.readouterr())
    assert got == code, said
    assert text in said
    assert "Traceback" not in said


def test_how_much_sharing_must_add_is_taken_where_jobs_share(tmp_path: Path) -> None:
    """Two jobs of 200 s on all GPUs, one of which computes while the other loads: together they
    end after 200 s. Where sharing must add more than is possible, one after the other."""
    path = tmp_path / "jobs.csv"
    path.write_text(
        "job_id,num_gpu,submit_time,iterations,model_name,batch_size,duration,interval,"
        "iteration_time,resource_time_0,resource_time_1,resource_time_2,priority\n"
        "a,8,0,1000,x,4,200000,0,200,0.5,199,0.5,0\nb,8,0,1000,y,4,200000,0,200,199,0.5,0.5,0\n"
    )
    words = ["simulate", path, "--nodes", 2, "--policy", "srsf", "--json", "--colocate", 2]
    means = [
        json.loads(run(*words, "--set", f"srsf.colocate_gain={gain}")[1])[0]["avg_jct_s"]
        for gain in (0, 9)
    ]
    assert means == pytest.approx([200, 300], rel=0.02)


def test_finish_time_fairness_by_hand(tmp_path: Path) -> None:
    """Four GPUs, first in, first out. Active jobs: 1 until 10 s, 2 until 50, 3 until 100, 2 until
    150, 1 until 200. rho = JCT / (alone max(1, GPUs N / 4)):

    a: 100 / (100 x 4 x 2.4 / 4) = 5/12      (it had more than its share)
    b: 140 / (50 x 2 x 33/14 / 4) = 392/165  (it waited for a)
    c: 150 / (100 x max(1, 2 x 2 / 4)) = 3/2
    """
    path = tmp_path / "jobs.csv"
    path.write_text("job_id,num_gpu,submission_time,duration\na,4,0,100\nb,2,10,50\nc,2,50,100\n")
    folder = tmp_path / "report"
    one_node = options(path, nodes=1, policies=("fifo",))
    assert simulate(one_node, folder, processes=1) == 0
    rows = [row.split(",") for row in (folder / "jobs.csv").read_text().splitlines()]
    column = rows[0].index("finish_time_fairness")
    rhos = [float(row[column]) for row in rows[1:]]
    assert rhos == pytest.approx([5 / 12, 392 / 165, 3 / 2])
    (summary,) = json.loads((folder / "summary.json").read_text())
    (counts,) = json.loads((folder / "counts.json").read_text())
    assert summary["max_finish_time_fairness"] == pytest.approx(392 / 165)
    assert counts["avg_finish_time_fairness"] == pytest.approx((5 / 12 + 392 / 165 + 3 / 2) / 3)


def test_two_policies_of_one_name(trace: Path) -> None:
    with pytest.raises(ConfigRejected, match="named twice"):
        simulate(options(trace, policies=("fifo", "fifo")))


@pytest.mark.parametrize(
    ("given", "said"),
    [({"quotas": "nobody=4"}, "no job has the tenant 'nobody'"),
     ({"quotas": "=inf"}, "NAME=NUMBER"),
     ({"restart_by_model": "vgg=3"}, "no job has the model 'vgg'; there are 'resnet50'"),
     ({"overhead": "none", "mtbf_s": 100.0}, "leave --spread-slowdown"),
     ({"nodes_max": 1}, "below the 2 nodes"),
     ({"nodes_max": 4}, "does not; add --set pollux.scale=true"),
     ({"cluster": "99999999x4"}, "at most 65536"),
     ({"why_at": (5.0,)}, "add --report")],
)  # fmt: skip
def test_options_that_would_do_nothing_or_too_much(
    trace: Path, given: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigRejected, match=said):
        simulate(options(trace, **given), processes=1)


def test_a_choice_that_there_is_not_is_answered_with_those_that_there_are(trace: Path) -> None:
    code, output = run("simulate", trace, "--overhead", "some")
    assert code == 2
    assert "choose one of full, none" in output


def test_optimus_says_which_job_model_it_needs(trace: Path) -> None:
    with pytest.raises(Rejected, match="profiles"):
        simulate(options(trace, policies=("optimus",), job_model="interleaved"), processes=1)


def test_pairs() -> None:
    assert pairs("a=1, b=2.5", "x") == {"a": 1.0, "b": 2.5}
    assert pairs("", "x") == {}
    for text in ("a=nan", "a=inf", "a=-1", "=1"):
        with pytest.raises(ConfigRejected, match="NAME=NUMBER"):
            pairs(text, "x")


def test_generated_workloads_differ_by_seed() -> None:
    code, output = run(
        "simulate", "generate:tiresias", "--nodes", 15, "--policy", "tiresias-las",
        "--set", "tiresias-las.limits=3200", "--seeds", 2, "--processes", 1,
    )  # fmt: skip
    assert code == 0
    assert "480/480" in output
    assert "2 seeds" in output


def test_gpu_types_from_gavels_table(traces_dir: Path, tmp_path: Path) -> None:
    """A heterogeneous cluster, durations and speeds as measured; checked by the auditor."""
    gavel = traces_dir / "gavel"
    code, _ = run(
        "simulate", gavel / "minimize_makespan.trace", "--throughputs",
        gavel / "simulation_throughputs.json", "--cluster", "6x1:v100,6x1:p100,6x1:k80",
        "--policy", "tiresias-las", "--report", tmp_path / "r",
    )  # fmt: skip
    assert code == 0
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())[0]
    assert summary["completed"] == 100
    assert summary["avg_jct_s"] < 85_308, "Gavel's own LAS on the same jobs and machines"
    assert audit(tmp_path / "r") == 0


RULED = """job_id,submit_s,gpus,duration_s,tenant,priority
a,0,4,1000,a,0
b,0,4,1000,a,0
c,10,4,1000,b,1
"""


@pytest.mark.parametrize(
    ("policy", "rule", "said"),
    [
        ("harmony", ("--quotas", "a=4,b=4"), "harmony does not keep tenants' quotas"),
        (
            "pollux",
            ("--quotas", "a=4,b=4", "--no-borrowing", "--set", "pollux.scale=true"),
            "pollux does not keep .* quotas",
        ),
        ("pollux", ("--priorities",), "pollux knows no priorities, and job c has priority 1"),
        ("jsq-chunk", ("--priorities",), "jsq-chunk knows no priorities"),
        ("harmony", ("--min-run-s", "60"), "harmony protects no job"),
        ("waterfill", ("--cluster", "1x4:a,1x4:b"), "waterfill knows one GPU type"),
    ],
)
def test_a_rule_that_a_policy_ignores_is_refused_before_any_run(
    tmp_path: Path, policy: str, rule: tuple[str, ...], said: str
) -> None:
    """Also where another policy of the same command keeps it."""
    path = tmp_path / "ruled.csv"
    path.write_text(RULED)
    words = ("--policy", "fifo", "--policy", policy, "--nodes", "2", "--report", tmp_path / "r")
    code, output = run("simulate", path, *words, *rule)
    assert code == 2, output
    assert re.search(said, " ".join(output.split())), output
    assert not (tmp_path / "r").exists()
