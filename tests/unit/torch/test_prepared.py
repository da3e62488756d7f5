"""Samples that are prepared once and read back, with less memory than they need."""

import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slackwater.common.base.errors import ConfigRejected, Rejected, Unavailable

torch = pytest.importorskip("torch", reason="needs the extra `torch`: make setup-torch")

from slackwater.torch.prepared import Prepared  # noqa: E402
from slackwater.torch.samples import pack, unpack  # noqa: E402

SAMPLES, PIXELS = 64, 1024


class Costly:
    """Counts in a file, which workers of a DataLoader share, what was prepared."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "prepared"
        self._log.touch()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Any, int]:
        with self._log.open("a") as file:
            file.write(f"{index}\n")
        return torch.full((PIXELS,), float(index)), index

    @property
    def prepared(self) -> int:
        return len(self._log.read_text().splitlines())


def epoch(data: Prepared, workers: int, context: str | None = None, seed: int = 0) -> None:
    """A shuffled one; every sample is what it should be."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # A forked process with threads, says a newer Python.
        loader = torch.utils.data.DataLoader(
            data, batch_size=10, shuffle=True, num_workers=workers,
            multiprocessing_context=context, generator=torch.Generator().manual_seed(seed),
        )  # fmt: skip
        seen = []
        for images, labels in loader:
            assert torch.equal(images, labels[:, None].float().expand(-1, PIXELS))
            seen += labels.tolist()
    assert sorted(seen) == list(range(SAMPLES))


@pytest.mark.parametrize(
    ("workers", "context"),
    [
        pytest.param(0, None, id="alone"),
        pytest.param(2, "fork", id="forked"),
        pytest.param(1, "spawn", id="spawned", marks=pytest.mark.slow),
    ],
)
def test_a_second_epoch_prepares_nothing(workers: int, context: str | None, tmp_path: Path) -> None:
    """A quarter of the samples fits memory, the others go to disk."""
    costly = Costly(tmp_path)
    nbytes = SAMPLES * (4 * PIXELS + 64)
    with Prepared(costly, memory_bytes=nbytes // 4, disk_bytes=nbytes, folder=tmp_path) as data:
        epoch(data, workers, context)
        assert costly.prepared == SAMPLES
        for seed in (1, 2):
            epoch(data, workers, context, seed)
        assert costly.prepared == SAMPLES
        found = data.figures()
        assert (found["kept"], found["missing"], found["found"]) == (SAMPLES, SAMPLES, 2 * SAMPLES)
        assert found["memory_bytes"] <= nbytes // 4
        assert 0 < found["memory_blobs"] < SAMPLES // 3
        assert found["memory_blobs"] + found["disk_blobs"] == SAMPLES
    assert [path.name for path in tmp_path.iterdir()] == ["prepared"], "nothing is left"
    with pytest.raises(Unavailable, match="nobody keeps what was spilled"):
        data[0]


def test_what_there_is_no_room_for_is_prepared_again(tmp_path: Path) -> None:
    costly = Costly(tmp_path)
    with Prepared(costly, memory_bytes=16 * (4 * PIXELS + 64)) as data:
        epoch(data, 0)
        epoch(data, 0, seed=1)
        found = data.figures()
    kept = found["memory_blobs"]
    assert 15 <= kept <= 16
    assert costly.prepared == 2 * SAMPLES - kept
    assert found["refused"] == 2 * (SAMPLES - kept)


def test_a_sample_that_was_damaged_is_prepared_again(tmp_path: Path) -> None:
    costly = Costly(tmp_path)
    with Prepared(costly, memory_bytes=0, disk_bytes=1 << 20, folder=tmp_path) as data:
        epoch(data, 0)
        for path in tmp_path.glob("slackwater-spill-*/disk/blob-*"):
            if path.name.endswith("0"):
                path.write_bytes(path.read_bytes()[:-1] + b"?")
        epoch(data, 0)
        found = data.figures()
        assert found["unreadable"] == 7
        assert costly.prepared == SAMPLES + 7
        epoch(data, 0)
        assert costly.prepared == SAMPLES + 7


def test_what_is_random_comes_after(tmp_path: Path) -> None:
    with Prepared(Costly(tmp_path), memory_bytes=1 << 20, transform=lambda s: s[1] + 100) as data:
        assert [data[3], data[3]] == [103, 103]
        assert data.figures()["found"] == 1


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"memory_bytes": 0}, "are all 0"),
        ({"memory_bytes": -1}, "memory_bytes -1: give 0 or more"),
        ({"memory_bytes": 1, "remote_bytes": 1 << 20}, "remote_bytes needs the url"),
        ({"memory_bytes": 1, "disk_bytes": 1, "folder": Path("/nosuch")}, "cannot be kept"),
    ],
    ids=["nowhere", "negative", "no cluster", "no folder"],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigRejected, match=why):
        Prepared(Costly(tmp_path), **options)


def test_a_stream_is_no_map_style_data_set() -> None:
    with pytest.raises(Rejected, match="a generator has no samples by number"):
        Prepared((n for n in range(3)), memory_bytes=1)


SAMPLES_OF_ALL_KINDS = [
    torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).T,
    torch.tensor(2.5, dtype=torch.float64),
    torch.empty((0, 3), dtype=torch.int16),
    torch.tensor([True, False]),
    torch.tensor([1 + 2j]),
    np.arange(6, dtype=">i4").reshape(2, 3)[:, ::2],
    np.float32(1.5),
    np.array(["2026-11-22"], "M8[D]"),
    np.zeros((2, 0)),
    (1, [2.5, None], {"a": "text", 7: b"bytes"}, True, (torch.ones(2), "x")),
]


@pytest.mark.parametrize("sample", SAMPLES_OF_ALL_KINDS, ids=lambda s: type(s).__name__)
def test_what_is_unpacked_is_what_was_packed(sample: Any) -> None:
    back = unpack(pack(sample))
    same(back, sample)


def same(back: Any, sample: Any) -> None:
    assert type(back) is type(sample)
    if isinstance(sample, torch.Tensor):
        assert back.dtype == sample.dtype
        assert torch.equal(back, sample)
        back.zero_()  # It may be written.
    elif isinstance(sample, np.ndarray | np.generic):
        assert back.dtype == sample.dtype
        np.testing.assert_array_equal(back, sample)
    elif isinstance(sample, tuple | list):
        assert len(back) == len(sample)
        for one, other in zip(back, sample, strict=True):
            same(one, other)
    elif isinstance(sample, dict):
        assert list(back) == list(sample)
        same(list(back.values()), list(sample.values()))
    else:
        assert back == sample


@pytest.mark.parametrize(
    ("sample", "why"),
    [
        (object(), "a sample has a object, which cannot be kept"),
        ({(1,): 2}, "a sample has a dict"),
        (torch.ones(2, requires_grad=True), "with a gradient"),
        (torch.nn.Parameter(torch.ones(2)), "with a gradient"),
        (np.array([object()]), "array of object"),
        (2**70, "more than 64 bits"),
        (time, "a sample has a module"),
    ],
    ids=["object", "keys", "gradient", "parameter", "objects", "number", "module"],
)
def test_what_cannot_be_kept_is_refused_by_name(sample: Any, why: str) -> None:
    with pytest.raises(Rejected, match=why):
        pack(sample)
