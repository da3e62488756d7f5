"""Buckets as files, and regions filled from them, whatever the buckets were and are."""

import io
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slackwater.common.base.checkpoint_folder import BUCKETS, TORCH, UPDATE, CheckpointFolder
from slackwater.common.base.errors import Rejected
from slackwater.common.domains.slots.layout import bucket_start, bucket_tensors, plan_buckets
from slackwater.common.domains.slots.region import SlotRegion
from slackwater.common.domains.slots.rules import narrow, widen
from slackwater.common.domains.slots.saved_bucket import BucketCopy, SavedJob, read_part
from slackwater.common.domains.slots.saved_pieces import spans_of
from slackwater.schemas.base import JobId
from slackwater.schemas.jobs import Consistency
from slackwater.schemas.placement import BucketLayout, JobPlan
from slackwater.schemas.tensors import TensorSpec, UpdateRule

TENSORS = tuple(
    TensorSpec(name=f"t{number}", shape=shape)
    for number, shape in enumerate([(300, 40), (7,), (9000,), (64, 3, 3), (1,), (5, 5)])
)
ELEMENTS = sum(prod(tensor.shape) for tensor in TENSORS)


def plan(rule: str = "adam", consistency: Consistency = "synchronous", workers: int = 2) -> JobPlan:
    return JobPlan(
        job=JobId("j"), workers=workers, gradient_dtype="float32", update=UpdateRule(name=rule),
        consistency=consistency, layout_epoch=1, token="",
    )  # fmt: skip


def region(of: JobPlan, layout: BucketLayout) -> SlotRegion:
    own = bucket_tensors(layout, TENSORS)
    memory = bytearray(SlotRegion.nbytes_of(of, layout, own))
    return SlotRegion.format(memory, of, layout, own, 0)


def filled(of: JobPlan, layout: BucketLayout, values: Any, version: int) -> SlotRegion:
    """A region whose arrays have the bucket's part of `values`, (array, element of the job)."""
    made = region(of, layout)
    first = bucket_start(layout, TENSORS)
    mine = values[:, first : first + layout.elements]
    made.parameters(version)[:] = mine[0]
    for index, state in enumerate(mine[1:]):
        made.state(version, index)[:] = state
    made.initialize(version, version)
    return made


def save(folder: Path, of: JobPlan, layouts: Any, values: Any, version: int) -> None:
    there = CheckpointFolder(folder, BUCKETS)
    for layout in layouts:
        copy = BucketCopy.of(filled(of, layout, values, version), version)
        first = bucket_start(layout, TENSORS)
        there.write(
            version, layout.index, len(layouts), BUCKETS,
            lambda path, copy=copy, first=first: copy.write(path, TENSORS, first),
        )  # fmt: skip


def values_of(seed: int, arrays: int = 3) -> Any:
    return np.random.default_rng(seed).standard_normal((arrays, ELEMENTS)).astype(np.float32)


def contents(regions: list[SlotRegion], version: int, arrays: int = 3) -> Any:
    """All elements, in the order of the job's tensors."""
    rows: list[list[Any]] = [[] for _ in range(arrays)]
    for each in sorted(regions, key=lambda r: bucket_start(r.bucket, TENSORS)):
        rows[0].append(each.parameters(version))
        for index in range(arrays - 1):
            rows[index + 1].append(each.state(version, index))
    return np.array([np.concatenate(row) for row in rows])


@given(
    sizes=st.tuples(st.integers(1_000, 60_000), st.integers(1_000, 60_000)),
    version=st.integers(0, 10**9),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_job_of_other_buckets_begins_with_the_same_values(
    tmp_path_factory: pytest.TempPathFactory, sizes: tuple[int, int], version: int, seed: int
) -> None:
    folder, values = tmp_path_factory.mktemp("saved"), values_of(seed)
    save(folder, plan(), plan_buckets(TENSORS, sizes[0]), values, version)
    saved = SavedJob(folder)
    regions = [region(plan(), layout) for layout in plan_buckets(TENSORS, sizes[1])]
    for each in regions:
        saved.restore(each, TENSORS)
        assert (each.initialized, each.version) == (True, version)
        assert each.all_pushed() == [version] * 2
        assert each.version - each.state_since == version, "bias corrections go on"
    assert (contents(regions, version) == values).all()


@pytest.mark.parametrize("rounded", [False, True])
def test_updates_go_before_the_set_and_newer_ones_before_older(
    tmp_path: Path, rounded: bool
) -> None:
    layouts = plan_buckets(TENSORS, 1 << 20)
    assert len(layouts) == 1
    base, later, latest = (values_of(seed) for seed in range(3))
    save(tmp_path, plan(), layouts, base, 10)
    expected = base.copy()
    for version, values, numbers in ((12, later, [0, 1]), (15, latest, [1, 4])):
        copy = BucketCopy.of(filled(plan(), layouts[0], values, version), version)
        spans = spans_of(np.array(numbers), ELEMENTS)
        CheckpointFolder(tmp_path, BUCKETS).write(
            version, 0, 1, UPDATE,
            lambda path, copy=copy, spans=spans: copy.write(
                path, TENSORS, 0, spans, rounded=rounded
            ),
        )  # fmt: skip
        for first, end in spans:
            news = values[:, first:end]
            expected[:, first:end] = widen(narrow(news)) if rounded else news
    sizes = [path.stat().st_size for path in tmp_path.glob("update-*.npz")]
    exact_bytes = 3 * 4 * 2 * 4096
    assert all((size < 0.6 * exact_bytes) == rounded for size in sizes), "half as many bytes"
    made = region(plan(), layouts[0])
    SavedJob(tmp_path).restore(made, TENSORS)
    assert made.version == 15, "all of it is taken for the newest"
    assert (contents([made], 15) == expected).all()
    bare = region(plan(), layouts[0])
    SavedJob(tmp_path).stand_in(bare, TENSORS)
    assert not bare.initialized, "workers may have newer values"
    assert (contents([bare], 0) == expected).all()
    assert (contents([bare], 1) == expected).all()


def test_an_asynchronous_job_goes_on_with_what_its_workers_had_applied(tmp_path: Path) -> None:
    of, layouts = plan("momentum", "asynchronous"), plan_buckets(TENSORS, 1 << 20)
    source = filled(of, layouts[0], values_of(0, 2), 7)
    source.set_applied(7, [4, 3])
    copy = BucketCopy.of(source, 7)
    CheckpointFolder(tmp_path, BUCKETS).write(
        7, 0, 1, BUCKETS, lambda path: copy.write(path, TENSORS, 0)
    )
    made = region(of, layouts[0])
    SavedJob(tmp_path).restore(made, TENSORS)
    assert (made.version, made.applied(), made.all_pushed()) == (7, [4, 3], [4, 3])
    bare = region(of, layouts[0])
    SavedJob(tmp_path).stand_in(bare, TENSORS)
    assert (bare.initialized, bare.version, bare.applied()) == (False, 7, [4, 3])
    more = region(plan("momentum", "asynchronous", workers=3), layouts[0])
    with pytest.raises(Rejected, match="had 2 workers, this one has 3"):
        SavedJob(tmp_path).restore(more, TENSORS)


def test_what_does_not_fit_is_refused_by_its_name_and_leaves_the_region_bare(
    tmp_path: Path,
) -> None:
    layouts = plan_buckets(TENSORS, 1 << 20)
    save(tmp_path, plan(), layouts, values_of(0), 3)
    saved = SavedJob(tmp_path)
    renamed = (*TENSORS[:-1], msgspec.structs.replace(TENSORS[-1], name="other"))
    for tensors, of, said in (
        (renamed, plan(), r"has tensor t5 \[5, 5\] where this one has other"),
        (TENSORS, plan("momentum"), "has the states of adam, this job's rule is momentum"),
        (TENSORS, plan("adam", "asynchronous"), "was synchronous, this job is asynchronous"),
    ):
        made = region(of, layouts[0])
        with pytest.raises(Rejected, match=said):
            saved.restore(made, tensors)
        assert not made.initialized


def test_a_program_and_its_aggregators_may_save_in_one_folder(tmp_path: Path) -> None:
    """Neither takes, counts or removes the other's files, of the same iteration and parts too."""
    layouts = plan_buckets(TENSORS, 1 << 20)
    program = CheckpointFolder(tmp_path)
    for iteration in (3, 5):
        program.write(iteration, 0, 1, TORCH, lambda path: path.write_bytes(b"a program's"))
        save(tmp_path, plan(), layouts, values_of(iteration), iteration)
    own, theirs = program.sets(), CheckpointFolder(tmp_path, BUCKETS).sets()
    assert [parts[0].iteration for parts in own] == [parts[0].iteration for parts in theirs]
    assert {parts[0].kind for parts in own} == {TORCH}
    assert {parts[0].kind for parts in theirs} == {BUCKETS}
    program.clear(0, 0)
    assert program.sets() == []
    assert CheckpointFolder(tmp_path, BUCKETS).sets() == theirs
    made = region(plan(), layouts[0])
    SavedJob(tmp_path).restore(made, TENSORS)
    assert made.version == 5


def test_a_damaged_file_is_found_before_it_is_taken(tmp_path: Path) -> None:
    layouts = plan_buckets(TENSORS, 1 << 20)
    save(tmp_path, plan(), layouts, values_of(0), 3)
    saved = SavedJob(tmp_path)
    file = next(tmp_path.glob("*.npz"))
    damaged = bytearray(file.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    file.write_bytes(damaged)
    with pytest.raises(Rejected, match="does not have the bytes that were written; remove iter"):
        saved.restore(region(plan(), layouts[0]), TENSORS)


@given(st.binary(max_size=200), st.integers(0, 5_000), st.booleans())
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_bytes_make_the_reader_raise_anything_but_rejected(
    tmp_path: Path, noise: bytes, at: int, whole: bool
) -> None:
    """Noise alone, and a part with noise in it."""
    path = tmp_path / "part.npz"
    if whole:
        path.write_bytes(noise)
    else:
        buffer = io.BytesIO()
        copy = BucketCopy.of(filled(plan(), plan_buckets(TENSORS, 1 << 20)[0], values_of(0), 3), 3)
        copy.write(path, TENSORS, 0)
        buffer.write(path.read_bytes())
        buffer.seek(at)
        buffer.write(noise)
        path.write_bytes(buffer.getvalue())
    with suppress(Rejected):
        read_part(path)


@pytest.mark.parametrize(
    "spans",
    [
        np.array([[0, 4]], np.int32),
        np.array([0, 4]),
        np.array([[3, 2]]),
        np.array([[0, ELEMENTS + 1]]),
        np.array([[-1, 3]]),
        np.array([[0, 5]]),
    ],
)
def test_spans_that_cannot_be_are_refused(tmp_path: Path, spans: Any) -> None:
    copy = BucketCopy.of(filled(plan(), plan_buckets(TENSORS, 1 << 20)[0], values_of(0), 3), 3)
    path = tmp_path / "part.npz"
    copy.write(path, TENSORS, 0, np.array([[0, 4]]))
    buffer = io.BytesIO()
    np.save(buffer, spans)
    with ZipFile(path) as found:
        members = {name: found.read(name) for name in found.namelist()}
    with ZipFile(path, "w") as made:
        for name, content in (members | {"spans.npy": buffer.getvalue()}).items():
            made.writestr(name, content)
    with pytest.raises(Rejected, match=r"part\.npz"):
        read_part(path)
