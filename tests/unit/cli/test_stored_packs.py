"""Packs that `submit` keeps in the object store: those that jobs name, and so many of a kind."""

import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest
from tests.venvs import environment

from slackwater.cli.workdir import packed, packed_venv
from slackwater.client import packs
from slackwater.client.packs import UNUSED_S, Sent, store
from slackwater.common.base.errors import Rejected
from slackwater.common.shell.client import Client
from slackwater.common.store.objects import MemoryObjects
from slackwater.schemas.job_requests import JobList
from slackwater.schemas.jobs import JobRecord, JobSpec


@dataclass
class Time:
    at_s: float = 0.0

    def now_s(self) -> float:
        return self.at_s


@dataclass
class Master:
    """A client as far as packs go."""

    clock: Time
    objects: MemoryObjects
    jobs: list[JobSpec] = field(default_factory=list)

    async def job_page(self, offset: int = 0) -> JobList:
        records = tuple(JobRecord(spec=spec) for spec in self.jobs)
        return JobList(jobs=records[offset : offset + 1], total=len(records))


@pytest.fixture
def master() -> Master:
    clock = Time()
    return Master(clock, MemoryObjects(clock))  # type: ignore[arg-type]


@pytest.fixture
def sent(tmp_path: Path) -> Sent:
    environment(tmp_path / "venv", tmp_path / "base")
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text("")
    return Sent(packed(tmp_path / "code"), packed_venv(tmp_path / "venv"))


async def test_packs_that_no_job_names_go_after_an_hour(master: Master, sent: Sent) -> None:
    assert sent.code is not None
    assert sent.venv is not None
    client = cast(Client, master)
    await store(client, sent)
    names = {sent.code.digest, f"venv-{sent.venv.digest}"}
    assert set(await master.objects.names()) == names
    for old in ("a" * 64, "venv-" + "a" * 64, "b" * 64, "venv-" + "c" * 64):
        await master.objects.put(old, io.BytesIO(b""))
    master.jobs = [JobSpec(id="j", code="b" * 64), JobSpec(id="k", venv="c" * 64)]
    master.clock.at_s = UNUSED_S
    await store(client, sent)
    assert len(await master.objects.names()) == 6
    master.clock.at_s = UNUSED_S + 1.0
    await store(client, Sent(None))
    assert len(await master.objects.names()) == 6, "nothing is sent with that job"
    await store(client, sent)
    assert set(await master.objects.names()) == names | {"b" * 64, "venv-" + "c" * 64}


async def test_environments_have_a_bound_of_their_own(
    master: Master, sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packs, "VENVS_MAX", 1)
    await master.objects.put("venv-" + "a" * 64, io.BytesIO(b""))
    with pytest.raises(Rejected, match=r"1 virtual environments are stored .* without --venv"):
        await store(cast(Client, master), sent)
    await store(cast(Client, master), Sent(sent.code))
    assert len(await master.objects.names()) == 2
