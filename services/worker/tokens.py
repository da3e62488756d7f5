"""The tokens of ranks' processes: made at their start, kept as digests, compared in constant time.

A token is bound to job, rank and process number by the file that its digest is in, beside the
rank's other files: a service that was started anew knows it again, and nobody can read it there.
"""

import hmac
import os
import secrets
from hashlib import sha256
from pathlib import Path

import msgspec

from slackwater.common.base.private_files import write_private
from slackwater.common.bus.relay import Ticket, write_ticket
from slackwater.schemas.relay import TOKEN_BYTES, RelayHello
from slackwater.services.worker.processes import RankFiles


class Kept(msgspec.Struct, frozen=True):
    digest: str
    uid: int
    """The account that the process runs under."""


def make_token(files: RankFiles, uid: int) -> bytes:
    """Return a new token of the rank's process. Raises OSError."""
    files.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    token = secrets.token_bytes(TOKEN_BYTES)
    kept = Kept(sha256(token).hexdigest(), uid)
    write_private(files.path("token"), msgspec.json.encode(kept).decode())
    return token


def open_ticket(files: RankFiles, relay: Path, account: int, ca: str = "") -> int:
    """Return the descriptor by which the rank's program is known to the relay at this socket.
    `account`: 0 for the service's own; `ca`: the file of the authority that vouches for other
    hosts. Raises OSError."""
    own = os.geteuid()
    token = make_token(files, account or own)
    hello = RelayHello(job=files.job, rank=files.rank, attempt=files.attempt, token=token)
    trusted = Path(ca).read_text(encoding="ascii", errors="replace") if ca else ""
    return write_ticket(Ticket(path=str(relay), hello=hello, service=own, ca=trusted))


def is_token(files: RankFiles, token: bytes, uid: int) -> bool:
    """Say whether the token is of the process, which runs now and under this account."""
    try:
        kept = msgspec.json.decode(files.path("token").read_bytes(), type=Kept)
    except (FileNotFoundError, msgspec.DecodeError):
        kept = Kept("", -1)
    equal = hmac.compare_digest(kept.digest, sha256(token).hexdigest())
    return equal and kept.uid == uid and files.lives()
