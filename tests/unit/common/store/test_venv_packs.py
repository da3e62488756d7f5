"""Packs of virtual environments: what belongs to one, which links may lead out of it, and that one
works at another place."""

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from tests.unit.common.store.test_code_packs import link, packed, payload_of
from tests.venvs import environment

from slackwater.common.base.errors import Rejected
from slackwater.common.store import venv_packs
from slackwater.common.store.packs import Pack, remove, unpack
from slackwater.common.store.venv_packs import VENV, Venv, pack, settle

PACKAGES = "lib/python3.11/site-packages"


def unpacked(made: Pack, target: Path) -> Path:
    payload = io.BytesIO(payload_of(made))
    unpack(payload, made.digest, target, VENV, lambda fresh: settle(fresh, target))
    return target


def test_an_environment_is_packed_without_what_was_made_for_its_place(tmp_path: Path) -> None:
    made = pack(environment(tmp_path / "venv", tmp_path / "base"))
    assert made.names == (
        "bin/long", "bin/other", "bin/python", "bin/python3", "bin/short", f"{PACKAGES}/sent.py",
        "lib64", "pyvenv.cfg",
    )  # fmt: skip


def test_scripts_start_with_the_interpreter_at_the_new_place(tmp_path: Path) -> None:
    """Scripts of pip with a short first line and with a long one; another shell's stays as it is.
    The new place has a space in its name."""
    made = pack(environment(tmp_path / "venv", tmp_path / "base"))
    target = unpacked(made, tmp_path / "new place")
    shutil.rmtree(tmp_path / "venv")
    for name in ("short", "long", "other"):
        script = target / "bin" / name
        out = subprocess.run([script, "x"], capture_output=True, text=True, check=True).stdout
        assert out == ("other\n" if name == "other" else f"ran {script} x\n")


def test_nothing_of_it_may_be_written_to(tmp_path: Path) -> None:
    target = unpacked(pack(environment(tmp_path / "venv", tmp_path / "base")), tmp_path / "new")
    found = [path for path in (target, *target.rglob("*")) if not path.is_symlink()]
    assert {path.stat().st_mode & 0o222 for path in found} == {0}
    assert {(target / "bin" / name).stat().st_mode & 0o111 for name in ("long", "short")} == {0o111}
    remove(target)
    assert not target.exists()


def test_links_lead_out_to_the_interpreter_alone(tmp_path: Path) -> None:
    """A chain of links of one machine is packed as what it ends at."""
    folder = environment(tmp_path / "venv", tmp_path / "base")
    real = os.readlink(folder / "bin" / "python")
    (tmp_path / "alternative").symlink_to(real)
    (folder / "bin" / "python").unlink()
    (folder / "bin" / "python").symlink_to(tmp_path / "alternative")
    target = unpacked(pack(folder), tmp_path / "new")
    assert os.readlink(target / "bin" / "python") == real
    assert os.readlink(target / "bin" / "python3") == "python"
    (folder / PACKAGES / "data").symlink_to("/etc")
    with pytest.raises(Rejected, match="data is a link to /etc, outside"):
        pack(folder)


@pytest.mark.parametrize(
    "entries",
    [
        [link("bin/python", "/etc/passwd")],
        [link("bin/sh", "/usr/bin/python3")],
        [link("lib/python", "/usr/bin/python3")],
        [link("bin/python", "../../python")],
        [link("bin/python", "/usr/bin/python3"), tarfile.TarInfo("bin/python/x")],
        [link("bin/python", "/usr/bin/python3"), link("x", "bin/python")],
        [link("bin/python", "/tmp/python"), link("x", "bin/python/secret")],
    ],
)
def test_no_other_link_leads_out_of_what_is_unpacked(
    tmp_path: Path, entries: list[tarfile.TarInfo]
) -> None:
    payload, digest = packed(*entries)
    with pytest.raises(Rejected, match="virtual environment"):
        unpack(io.BytesIO(payload), digest, tmp_path / "in" / "new", VENV)
    assert not list((tmp_path / "in").iterdir())


def test_a_machine_without_the_interpreter_is_told(tmp_path: Path) -> None:
    """None of it, another version behind its name, or an interpreter without its library."""
    base = tmp_path / "base"
    made = pack(environment(tmp_path / "venv", base, "3.77"))  # No machine has it at /lib.
    payload = payload_of(made)
    python, other = base / "bin" / "python3.77", base / "bin" / "python3.78"

    def refused() -> str:
        target = tmp_path / "new"
        with pytest.raises(Rejected, match="install it there, or submit the job with") as error:
            unpack(io.BytesIO(payload), made.digest, target, VENV, lambda f: settle(f, target))
        assert not target.exists()
        return str(error.value)

    shutil.rmtree(base / "lib")
    assert "whose library lib/python3.77 is not at" in refused()
    python.rename(other)
    assert f"needs Python 3.77 ({python}), which is not there" in refused()
    python.symlink_to(other)
    assert f"needs Python 3.77 ({other}), which is another version" in refused()


def test_what_is_not_an_environment_is_said(tmp_path: Path) -> None:
    with pytest.raises(Rejected, match=r"is not a virtual environment: it has no pyvenv\.cfg"):
        pack(tmp_path)
    folder = environment(tmp_path / "venv", tmp_path / "base")
    shutil.rmtree(tmp_path / "base")
    with pytest.raises(Rejected, match=r"venv needs Python 3.11 .* not there: make it anew"):
        pack(folder)
    (folder / "pyvenv.cfg").write_text("version = 3.11\n")
    with pytest.raises(Rejected, match="names no interpreter"):
        pack(folder)


def test_an_environment_has_limits_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = environment(tmp_path / "venv", tmp_path / "base")
    monkeypatch.setattr(venv_packs, "VENV", VENV._replace(bytes_max=10))
    with pytest.raises(Rejected, match=r"the largest are .* uninstall what the job"):
        pack(folder)


def test_packages_that_are_elsewhere_are_named(tmp_path: Path) -> None:
    """Editable installs of today and of old, each once; paths within the environment are not."""
    folder = environment(tmp_path / "venv", tmp_path / "base")
    packages = folder / PACKAGES
    for name in ("mine", "other"):
        (packages / f"{name}-1.0.dist-info").mkdir()
    told = {"url": f"file://{tmp_path}/my%20code", "dir_info": {"editable": True}}
    (packages / "mine-1.0.dist-info" / "direct_url.json").write_text(json.dumps(told))
    (packages / "other-1.0.dist-info" / "direct_url.json").write_text("[]")
    (packages / "_mine.pth").write_text(f"{tmp_path}/my code/src\n")
    (packages / "old.pth").write_text(f"import os\n/srv/old\n{packages}/within\n")
    first, second = Venv(folder).warnings()
    assert first.startswith(f"mine is used from {tmp_path}/my code, which is not sent")
    assert second.startswith("old.pth is used from /srv/old, which is not sent")


def test_a_real_environment_runs_at_another_place(tmp_path: Path) -> None:
    """Its modules are compiled once, and what fails is shown where it is."""
    folder = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    module = Venv(folder).packages / "sent.py"
    module.write_text("value = 42\ndef fail(): raise ValueError\n")
    target = unpacked(pack(folder), tmp_path / "new")
    shutil.rmtree(folder)
    shown = "import sent, sys; print(sys.prefix, sent.__cached__, sent.fail.__code__.co_filename)"
    words = (target / "bin" / "python", "-c", shown)
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
    assert said[0] == str(target)
    assert Path(said[1]).is_file()
    assert said[2] == str(Venv(target).packages / "sent.py")
