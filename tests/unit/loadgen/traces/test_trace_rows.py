"""Bad input is refused with file, line, column, value and expectation; our own CSV round-trips."""

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slackwater.common.base.errors import Rejected
from slackwater.loadgen.traces import Trace, TraceJob, TraceRejected, read, write

TIRESIAS = """job_id,num_gpu,submit_time,iterations,model_name,duration,interval
0,1,0,606,vgg19,164,30
1,8,30,133,vgg11,147,23
2,2,53,500,alexnet,1800,30
"""


def _read(tmp_path: Path, text: str | bytes, name: str = "t.csv", **options: object) -> Trace:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read(path, **options)  # type: ignore[arg-type]  # the options under test


def _refusal(tmp_path: Path, text: str | bytes, name: str = "t.csv") -> TraceRejected:
    with pytest.raises(TraceRejected) as caught:
        _read(tmp_path, text, name)
    assert "\n" not in str(caught.value)
    assert str(tmp_path / name) in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("num_gpu", "-3"),
        ("num_gpu", "0"),
        ("num_gpu", "1.5"),
        ("num_gpu", "1e9"),
        ("num_gpu", "nan"),
        ("num_gpu", ""),
        ("num_gpu", "two"),
        ("num_gpu", "1_0"),
        ("num_gpu", "٣"),
        ("submit_time", "-1"),
        ("submit_time", "inf"),
        ("duration", "nan"),
        ("duration", "1e11"),
        ("duration", "0x10"),
        ("iterations", "0"),
        ("iterations", "9" * 40),
        ("job_id", "  "),
        ("model_name", "x" * 300),
        ("model_name", "a\tb"),
    ],
)
def test_a_bad_cell_names_its_place(tmp_path: Path, column: str, value: str) -> None:
    header, *rows = TIRESIAS.splitlines()
    cells = rows[1].split(",")
    cells[header.split(",").index(column)] = value
    rows[1] = ",".join(cells)
    error = _refusal(tmp_path, "\n".join([header, *rows]) + "\n")
    assert (error.line, error.column, error.value) == (3, column, value)
    assert f":3: column '{column}': found " in str(error)
    assert "expected" in str(error)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    row=st.integers(0, 2),
    column=st.sampled_from(["num_gpu", "submit_time", "iterations", "duration", "interval"]),
    junk=st.text(alphabet="abcxyz-+!?", min_size=1, max_size=8),
)
def test_junk_in_a_number_is_found_where_it_is(
    tmp_path: Path, row: int, column: str, junk: str
) -> None:
    header, *rows = TIRESIAS.splitlines()
    cells = rows[row].split(",")
    cells[header.split(",").index(column)] = junk
    rows[row] = ",".join(cells)
    error = _refusal(tmp_path, "\n".join([header, *rows]))
    assert (error.line, error.column, error.value) == (row + 2, column, junk)


@pytest.mark.parametrize("junk", ["many", "1.5", "nan", "0", "70000"])
def test_what_a_count_must_be_is_said_whatever_is_wrong_with_it(tmp_path: Path, junk: str) -> None:
    error = _refusal(tmp_path, TIRESIAS.replace("\n1,8,30", f"\n1,{junk},30"))
    assert (error.line, error.column, error.value) == (3, "num_gpu", junk)
    assert "expected a whole number from 1 to 65536" in str(error)


def test_short_and_long_rows(tmp_path: Path) -> None:
    short = _refusal(tmp_path, TIRESIAS.replace("1,8,30,133,vgg11,147,23", "1,8,30,133,vgg11"))
    assert (short.line, short.column) == (3, "duration")
    assert "7 columns, this row has 5" in str(short)
    long = _refusal(tmp_path, TIRESIAS.replace("vgg11,147,23", "vgg11,147,23,99"))
    assert (long.line, long.value) == (3, "99")


def test_missing_and_duplicate_columns(tmp_path: Path) -> None:
    missing = _refusal(tmp_path, TIRESIAS.replace("duration", "length"))
    assert (missing.line, missing.column) == (1, "duration")
    assert "this column in the format tiresias; it is missing" in str(missing)
    twice = _refusal(tmp_path, TIRESIAS.replace("interval", "duration"))
    assert twice.column == "duration"
    assert "only once" in str(twice)


def test_duplicate_ids_name_both_lines(tmp_path: Path) -> None:
    error = _refusal(tmp_path, TIRESIAS.replace("\n2,", "\n0,"))
    assert (error.line, error.value) == (4, "0")
    assert "line 2 has it too" in str(error)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "the file is empty"),
        (b" \n\n", "the file is empty"),
        (TIRESIAS.splitlines()[0].encode(), "at least one job"),
        (b"\x1f\x8b\x08\x00\xff\xfe", "UTF-8 text"),
        (TIRESIAS.encode() + b"\0\0", "not binary data"),
        (b"just words\n", "the header of a known format"),
        (b"[1, 2]", "an object with jobid"),
        (TIRESIAS.replace("vgg11", '"vgg11').encode(), "well-formed cells"),
        (b"a\tb\tc\td\te\tf\tg\n", "expected a"),
    ],
)
def test_what_is_no_trace(tmp_path: Path, content: bytes, expected: str) -> None:
    assert expected in str(_refusal(tmp_path, content))


def test_absent_file_directory_and_unknown_format(tmp_path: Path) -> None:
    with pytest.raises(TraceRejected, match=r"nope\.csv: expected a readable trace file"):
        read(tmp_path / "nope.csv")
    with pytest.raises(TraceRejected, match="readable trace file"):
        read(tmp_path)
    with pytest.raises(Rejected, match="unknown trace format 'excel'; known: slackwater"):
        _read(tmp_path, TIRESIAS, format="excel")
    with pytest.raises(Rejected, match="limit of 0"):
        _read(tmp_path, TIRESIAS, limit=0)
    with pytest.raises(TraceRejected, match="column 'submission_time'"):
        _read(tmp_path, TIRESIAS, format="itp")


def test_forgiven_forms(tmp_path: Path) -> None:
    """A byte-order mark, CRLF, blank lines, other column orders, unsorted rows, a late origin and
    whole numbers written as floats change nothing."""
    plain = _read(tmp_path, TIRESIAS)
    text = TIRESIAS.replace("0,1,0,", "0,1.0,0,").replace("\n", "\r\n\r\n")
    assert _read(tmp_path, b"\xef\xbb\xbf" + text.encode()).jobs == plain.jobs
    header, *rows = TIRESIAS.splitlines()
    assert _read(tmp_path, "\n".join([header, *rows[::-1]])).jobs == plain.jobs
    turned = "\n".join(",".join(line.split(",")[::-1]) for line in TIRESIAS.splitlines())
    assert _read(tmp_path, turned).jobs == plain.jobs
    later = "\n".join([header, *(row.replace(",", ",", 1) for row in rows)])
    for old, new in ((",0,606", ",500,606"), (",30,133", ",530,133"), (",53,500", ",553,500")):
        later = later.replace(old, new)
    trace = _read(tmp_path, later)
    assert (trace.jobs, trace.origin_s) == (plain.jobs, 500.0)
    with pytest.raises(Rejected, match="give an earlier origin"):
        _read(tmp_path, later, origin_s=501.0)


def test_unknown_columns_are_kept(tmp_path: Path) -> None:
    lines = TIRESIAS.splitlines()
    text = "\n".join([lines[0] + ",owner", *(line + ",ann" for line in lines[1:])])
    assert _read(tmp_path, text).jobs[0].extra == {"interval_s": 30.0, "owner": "ann"}


# The original release of Philly -------------------------------------------------------------------


def _philly(**changes: object) -> dict[str, object]:
    job = {
        "status": "Pass",
        "vc": "ee9e8c",
        "jobid": "application_1506638472019_10238",
        "attempts": [
            {
                "start_time": "2017-10-07 01:11:39",
                "end_time": "2017-10-07 01:12:39",
                "detail": [{"ip": "m1", "gpus": ["gpu0", "gpu1"]}, {"ip": "m2", "gpus": ["gpu5"]}],
            },
            {
                "start_time": "2017-10-07 02:00:00",
                "end_time": "2017-10-07 02:30:00",
                "detail": [{"ip": "m1", "gpus": ["gpu0"]}],
            },
        ],
        "submitted_time": "2017-10-07 01:11:36",
        "user": "ce2f4c",
    }
    return job | changes


def _log(*jobs: object) -> str:
    return "[\n" + ",\n".join(json.dumps(job) for job in jobs) + "\n]\n"


def test_philly_json_folds_attempts(tmp_path: Path) -> None:
    """Run times add up, the widest attempt gives the GPUs; jobs that never ran are counted."""
    trace = _read(
        tmp_path,
        _log(
            _philly(),
            _philly(jobid="b", attempts=[]),
            _philly(jobid="c", attempts=[{"start_time": None, "end_time": "None", "detail": []}]),
            _philly(
                jobid="d",
                attempts=[
                    {
                        "start_time": "2017-10-07 01:11:39",
                        "end_time": "2017-10-07 01:12:39",
                        "detail": [],
                    }
                ],
            ),
            _philly(jobid="e", submitted_time="2017-10-07 01:11:37"),
        ),
        "cluster_job_log",
    )
    assert trace.format == "philly-json"
    assert dict(trace.skipped) == {"never ran": 2, "held no GPU": 1}
    first, second = trace.jobs
    assert (first.gpus, first.duration_s, first.tenant) == (3, 60.0 + 1800.0, "ee9e8c")
    assert first.extra == {"status": "Pass", "user": "ce2f4c", "attempts": 2}
    assert second.submit_s - first.submit_s == 1.0
    assert trace.origin_s == 1507338696.0


@pytest.mark.parametrize(
    ("bad", "column"),
    [
        (_philly(jobid="x", submitted_time="yesterday"), "submitted_time"),
        (_philly(jobid="x", submitted_time=None), "submitted_time"),
        (_philly(jobid=""), "jobid"),
        (_philly(jobid="x", vc=7), "vc"),
        (_philly(jobid="x", attempts=None), "attempts"),
        (_philly(jobid="x", attempts=["y"]), "attempts[0]"),
        (
            _philly(
                jobid="x",
                attempts=[{"start_time": "2017-10-07 02:00:00", "end_time": "2017-10-07 01:00:00"}],
            ),
            "attempts[0].end_time",
        ),
        (_philly(jobid="x", attempts=[{"detail": [{"ip": "m"}]}]), "attempts[0].detail"),
        (["not", "a", "job"], "job"),
        (_philly(), "job id"),
    ],
)
def test_philly_json_faults_name_line_and_field(tmp_path: Path, bad: object, column: str) -> None:
    error = _refusal(tmp_path, _log(_philly(), bad), "cluster_job_log")
    assert (error.line, error.column) == (3, column)


@pytest.mark.parametrize("text", ["[", "[{}", "[{} {}]", "[NaN]", "[] x", "[" * 100_000])
def test_broken_json_is_refused(tmp_path: Path, text: str) -> None:
    _refusal(tmp_path, text, "cluster_job_log")


def test_philly_csv_checks_its_gpu_time(tmp_path: Path) -> None:
    header = "timestamp,duration,num_gpus,gpu_time,cluster\n"
    good = "2017-09-04 10:30:41,10.0,8,80.0,7f04ca\n"
    assert _read(tmp_path, header + good).jobs[0].gpus == 8
    error = _refusal(tmp_path, header + good + good.replace("80.0", "70.0"))
    assert (error.line, error.column) == (3, "gpu_time")
    error = _refusal(tmp_path, header + good.replace("2017-09-04", "2017-13-04"))
    assert (error.line, error.column, error.value) == (2, "timestamp", "2017-13-04 10:30:41")


# Our own format -----------------------------------------------------------------------------------

_TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), max_size=12)
_SECONDS = st.floats(0.0, 1e10)
_NAMES = st.text(alphabet="abcdefgh_0123", min_size=1, max_size=6)
_JOBS = st.builds(
    TraceJob,
    id=_TEXTS.filter(bool),
    submit_s=_SECONDS,
    gpus=st.integers(0, 65_536),
    duration_s=st.none() | _SECONDS,
    model=_TEXTS,
    tenant=_TEXTS,
    iterations=st.none() | st.integers(1, 2**53),
    batch_size=st.none() | st.integers(1, 2**53),
    iteration_s=st.none() | _SECONDS,
    stages_s=st.dictionaries(_NAMES, _SECONDS, max_size=3),
    extra=st.dictionaries(
        _NAMES,
        _TEXTS | st.integers(-(2**53), 2**53) | st.floats(-1e12, 1e12) | st.booleans(),
        max_size=3,
    ),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(jobs=st.lists(_JOBS, min_size=1, max_size=6, unique_by=lambda job: job.id))
def test_own_format_round_trips(tmp_path: Path, jobs: list[TraceJob]) -> None:
    """Every field comes back equal, floats to the last bit; writing again gives equal bytes."""
    text = write(jobs)
    trace = _read(tmp_path, text, origin_s=0.0)
    assert trace.format == "slackwater"
    assert list(trace.jobs) == sorted(jobs, key=lambda job: job.submit_s)
    assert write(trace.jobs) == write(sorted(jobs, key=lambda job: job.submit_s))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    row=st.integers(0, 2),
    column=st.sampled_from(["submit_s", "gpus", "duration_s", "iterations", "stages_s", "extra"]),
    junk=st.text(alphabet="abcxyz-+!?=;", min_size=1, max_size=8),
)
def test_own_rows_with_junk_are_found(tmp_path: Path, row: int, column: str, junk: str) -> None:
    jobs = [TraceJob(id=f"j{index}", submit_s=float(index), gpus=1) for index in range(3)]
    lines = write(jobs).splitlines()
    cells = lines[row + 1].split(",")
    cells[lines[0].split(",").index(column)] = junk
    lines[row + 1] = ",".join(cells)
    error = _refusal(tmp_path, "\n".join(lines))
    assert (error.line, error.column, error.value) == (row + 2, column, junk)


def test_three_columns_are_enough(tmp_path: Path) -> None:
    trace = _read(tmp_path, "gpus,job_id,submit_s\n2,a,10\n1,b,12.5\n")
    assert trace.format == "slackwater"
    assert [(job.id, job.gpus, job.submit_s) for job in trace.jobs] == [("a", 2, 0), ("b", 1, 2.5)]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"submit_s": float("nan")}, "submit_s is nan"),
        ({"duration_s": -1.0}, "duration_s is -1.0"),
        ({"gpus": -1}, "gpus is -1"),
        ({"iterations": 0}, "iterations is 0"),
        ({"id": ""}, "its id is empty"),
        ({"model": " x"}, "model is ' x'"),
        ({"tenant": "a\nb"}, "tenant is"),
        ({"stages_s": {"a b": 1.0}}, "stage 'a b'"),
        ({"stages_s": {"a": float("inf")}}, "stage 'a' is inf"),
        ({"extra": {"x": float("nan")}}, "extra 'x' is nan"),
        ({"extra": {"x": 2**60}}, "extra 'x' is"),
        ({"extra": {"x": "y" * 5000}}, "over 4096"),
    ],
)
def test_what_could_not_be_read_is_not_written(changes: dict[str, object], why: str) -> None:
    fields: dict[str, object] = {"id": "j", "submit_s": 0.0, "gpus": 1} | changes
    with pytest.raises(Rejected, match=why):
        write([TraceJob(**fields)])  # type: ignore[arg-type]  # wrong on purpose


def test_one_id_twice_is_not_written() -> None:
    job = TraceJob(id="j", submit_s=0.0, gpus=1)
    with pytest.raises(Rejected, match="two jobs have the id 'j'"):
        write([job, job])


def test_a_hundred_thousand_rows(tmp_path: Path) -> None:
    """Size alone changes nothing: all rows come back, in order."""
    header, row = TIRESIAS.splitlines()[0], "{0},{1},{0},606,vgg19,164,30"
    lines = [header, *(row.format(number, number % 8 + 1) for number in range(100_000))]
    trace = _read(tmp_path, "\n".join(lines))
    assert len(trace.jobs) == 100_000
    assert sum(job.gpus for job in trace.jobs) == 100_000 // 8 * sum(range(1, 9))
    assert trace.jobs[-1].id == "99999"
