"""Packs of code: what belongs to one, that equal folders have equal digests, and that nothing which
is unpacked gets out of its folder, whoever packed it."""

import gzip
import hashlib
import io
import os
import subprocess
import tarfile
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slackwater.common.base.errors import Rejected
from slackwater.common.store import code_packs
from slackwater.common.store.code_packs import CODE, pack
from slackwater.common.store.packs import Pack, unpack


def payload_of(pack: Pack) -> bytes:
    written = io.BytesIO()
    pack.write(written)
    return written.getvalue()


def unpack_code(payload: bytes, digest: str, target: Path) -> None:
    unpack(io.BytesIO(payload), digest, target, code_packs.CODE)


def tree(folder: Path) -> dict[str, str]:
    """Describe every file and link below the folder."""
    return {
        str(path.relative_to(folder)): f"-> {os.readlink(path)}"
        if path.is_symlink()
        else f"{path.stat().st_mode & 0o7777:o} {path.read_text()}"
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def build(folder: Path) -> Path:
    (folder / "lib").mkdir(parents=True)
    (folder / "train.py").write_text("print(1)")
    (folder / "lib" / "model.py").write_text("x = 1")
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o4775)
    (folder / "link").symlink_to("lib/model.py")
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "train.pyc").write_text("compiled")
    return folder


def test_what_is_unpacked_is_what_was_packed_and_no_more(tmp_path: Path) -> None:
    made = pack(build(tmp_path / "code"))
    unpack_code(payload_of(made), made.digest, tmp_path / "copy")
    assert tree(tmp_path / "copy") == {
        "lib/model.py": "644 x = 1",
        "link": "-> lib/model.py",
        "run.sh": "755 #!/bin/sh\n",
        "train.py": "644 print(1)",
    }


def test_equal_folders_have_one_digest(tmp_path: Path) -> None:
    """Times, owners and what is ignored do not count; a changed byte does."""
    one, other = build(tmp_path / "one"), build(tmp_path / "other")
    os.utime(other / "train.py", (1, 1))
    (other / "__pycache__" / "more.pyc").write_text("x")
    assert pack(one).digest == pack(other).digest
    assert payload_of(pack(one)) == payload_of(pack(other))
    (other / "train.py").write_text("print(2)")
    assert pack(one).digest != pack(other).digest


def test_a_checkout_is_packed_as_git_sees_it(tmp_path: Path) -> None:
    folder = build(tmp_path / "code")
    subprocess.run(["git", "init", "-q", folder], check=True)
    (folder / ".gitignore").write_text("data/\n")
    (folder / "data").mkdir()
    (folder / "data" / "huge.bin").write_text("x" * 100)
    (folder / ".slackwaterignore").write_text("# not code\n*.sh\nlib/\n")
    made = pack(folder)
    unpack_code(payload_of(made), made.digest, tmp_path / "copy")
    names = {".gitignore", ".slackwaterignore", "link", "train.py"}
    assert set(tree(tmp_path / "copy")) == names


def test_too_much_is_refused_with_the_largest_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = build(tmp_path / "code")
    (folder / "weights.bin").write_bytes(b"x" * 5000)
    monkeypatch.setattr(code_packs, "CODE", CODE._replace(bytes_max=4096))
    with pytest.raises(Rejected, match=r"largest are weights.bin .* \.slackwaterignore"):
        pack(folder)
    monkeypatch.setattr(code_packs, "CODE", CODE._replace(files_max=2))
    with pytest.raises(Rejected, match="has 5 files, at most 2"):
        pack(folder)


def test_a_link_that_leads_outside_is_refused(tmp_path: Path) -> None:
    folder = build(tmp_path / "code")
    (folder / "data").symlink_to("/etc")
    with pytest.raises(Rejected, match="is a link to /etc, outside"):
        pack(folder)


def packed(*entries: tarfile.TarInfo, content: bytes = b"x") -> tuple[bytes, str]:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        for entry in entries:
            entry.size = len(content) if entry.isreg() else 0
            tar.addfile(entry, io.BytesIO(content))
    return gzip.compress(raw.getvalue()), hashlib.sha256(raw.getvalue()).hexdigest()


def link(name: str, to: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = kind, to
    return entry


def special(name: str, kind: bytes) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type = kind
    return entry


@pytest.mark.parametrize(
    "entries",
    [
        [tarfile.TarInfo("../out")],
        [tarfile.TarInfo("/tmp/out")],
        [tarfile.TarInfo("a/../../out")],
        [link("a", "/etc/passwd")],
        [link("a", "../out")],
        [link("a", "b"), tarfile.TarInfo("a/x"), link("b", "..")],
        [link("p/q/b", "../.."), link("p/q/a", "b/../out")],
        [link("a", "."), link("a/b", "x")],
        [link("a", "train.py", tarfile.LNKTYPE)],
        [special("a", tarfile.CHRTYPE)],
        [special("a", tarfile.FIFOTYPE)],
        [special("a", tarfile.DIRTYPE)],
        [link("a", "b"), link("b", "a")],
        [tarfile.TarInfo("a"), tarfile.TarInfo("a/b")],
    ],
)
def test_a_pack_that_would_write_elsewhere_is_refused(
    tmp_path: Path, entries: list[tarfile.TarInfo]
) -> None:
    place = tmp_path / "in"
    with pytest.raises(Rejected, match="pack of code"):
        unpack_code(*packed(*entries), place / "copy")
    assert list(tmp_path.rglob("*")) == [place]


def test_other_bytes_than_the_digest_s_are_refused(tmp_path: Path) -> None:
    made = pack(build(tmp_path / "code"))
    with pytest.raises(Rejected, match="is damaged"):
        unpack_code(payload_of(made), "0" * 64, tmp_path / "copy")
    with pytest.raises(Rejected, match="not a pack of code"):
        unpack_code(payload_of(made)[:-20], made.digest, tmp_path / "copy")


def test_a_sparse_entry_is_refused_and_never_written_out(tmp_path: Path) -> None:
    """One of 3 GiB fits into a pack of 10 KB, and took the worker service's memory."""
    tarred = io.BytesIO()
    with tarfile.open(fileobj=tarred, mode="w") as tar:
        entry = tarfile.TarInfo("large.bin")
        entry.type = tarfile.GNUTYPE_SPARSE
        tar.addfile(entry)
    with pytest.raises(Rejected, match="not a plain file"):
        unpack_code(gzip.compress(tarred.getvalue()), "0" * 64, tmp_path / "copy")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name_bytes", [0, 10**7])
def test_a_bomb_is_not_uncompressed(tmp_path: Path, name_bytes: int) -> None:
    """Nothing but padding, and one file whose name has ten megabytes."""
    tarred = bytes(10**7)
    if name_bytes:
        entry = tarfile.TarInfo("x" * name_bytes)
        tarred = entry.tobuf(tarfile.PAX_FORMAT) + tarred
    with pytest.raises(Rejected, match="with more than it says"):
        unpack_code(gzip.compress(tarred), "0" * 64, tmp_path / "copy")


def test_a_pack_larger_than_a_pack_may_be_is_refused_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    payload, digest = packed(tarfile.TarInfo("a"), tarfile.TarInfo("b"), content=bytes(600))
    monkeypatch.setattr(code_packs, "CODE", CODE._replace(bytes_max=1024))
    with pytest.raises(Rejected, match=r"more than 0\.0 MiB"):
        unpack_code(payload, digest, tmp_path / "copy")
    monkeypatch.setattr(code_packs, "CODE", CODE._replace(files_max=1))
    with pytest.raises(Rejected, match="more than 1 files"):
        unpack_code(payload, digest, tmp_path / "copy")


def test_files_that_change_while_they_are_packed_are_said(tmp_path: Path) -> None:
    made = pack(build(tmp_path / "code"))
    (tmp_path / "code" / "train.py").write_text("print(2)")
    with pytest.raises(Rejected, match="change meanwhile: submit it again"):
        payload_of(made)


NAMES = st.lists(st.sampled_from(["a", "b", "c", "..", ".", "", "\u00e4"]), min_size=1, max_size=4)
ENTRIES = st.lists(
    st.tuples(
        NAMES.map("/".join),
        st.sampled_from([tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE]),
        NAMES.map("/".join),
        st.integers(0, 0o7777),
    ),
    max_size=6,
)


@settings(max_examples=300, deadline=None)
@given(ENTRIES, st.binary(max_size=8), st.integers(0, 600))
def test_nothing_gets_out_whatever_is_in_a_pack(
    entries: list[tuple[str, bytes, str, int]], noise: bytes, at: int
) -> None:
    """Names, links, kinds and modes at random, some bytes of the tar overwritten: it is unpacked
    inside its folder, without any mode but two, or refused and nothing is left."""
    with tempfile.TemporaryDirectory() as folder:
        top = Path(folder)
        raw = io.BytesIO()
        with tarfile.open(fileobj=raw, mode="w") as tar:
            for name, kind, to, mode in entries:
                entry = link(name, to, kind)
                entry.mode = mode
                tar.addfile(entry)
        tarred = bytearray(raw.getvalue())
        tarred[at : at + len(noise)] = noise
        digest = hashlib.sha256(tarred).hexdigest()
        try:
            unpack_code(gzip.compress(bytes(tarred), 1), digest, top / "in" / "copy")
        except Rejected:
            assert not list((top / "in").iterdir())
            return
        assert [path.name for path in top.iterdir()] == ["in"]
        assert [path.name for path in (top / "in").iterdir()] == ["copy"]
        inside = (top / "in" / "copy").resolve()
        for path in inside.rglob("*"):
            assert path.resolve().is_relative_to(inside)
            if path.is_file() and not path.is_symlink():
                assert path.stat().st_mode & 0o7777 in (0o644, 0o755)
