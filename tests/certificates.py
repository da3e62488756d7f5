"""Certificates for tests, of an authority that is made for them. Needs openssl."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

needs_openssl = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="openssl makes the certificates"
)
_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@dataclass(frozen=True, slots=True)
class Certificates:
    """Files in PEM: of an authority, and of one server."""

    ca: str
    certificate: str
    key: str


def make_certificates(folder: Path, names: str = "IP:127.0.0.1") -> Certificates:
    """Make an authority, and a certificate for these names, both valid for two days."""
    _openssl("req", "-x509", *_KEY, "-subj", "/CN=authority", "-keyout", f"{folder}/ca.key",
             "-out", f"{folder}/ca.pem", "-days", "2")  # fmt: skip
    _openssl("req", "-new", *_KEY, "-subj", "/CN=server", "-keyout", f"{folder}/server.key",
             "-out", f"{folder}/server.csr")  # fmt: skip
    (folder / "ext").write_text(f"subjectAltName = {names}\n")
    _openssl("x509", "-req", "-in", f"{folder}/server.csr", "-CA", f"{folder}/ca.pem",
             "-CAkey", f"{folder}/ca.key", "-CAcreateserial", "-days", "2",
             "-extfile", f"{folder}/ext", "-out", f"{folder}/server.pem")  # fmt: skip
    return Certificates(f"{folder}/ca.pem", f"{folder}/server.pem", f"{folder}/server.key")


def _openssl(*words: str) -> None:
    subprocess.run(("openssl", *words), check=True, capture_output=True, timeout=30)
