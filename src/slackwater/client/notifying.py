"""Tell a webhook what befalls jobs: each fact that is wanted once, in order, through restarts.

A notice is sent until the receiver takes it: a fact may come twice where an answer was lost, under
the same number. Whoever does not take it for good (an HTTP status of 4xx) is not asked again.
"""

import asyncio
import hashlib
import hmac
from collections.abc import Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, Final
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

import msgspec

from slackwater.client import happened
from slackwater.client.happened import Told
from slackwater.common.base.errors import ConfigRejected, Retryable
from slackwater.common.base.private_files import write_private
from slackwater.common.shell.client import Client

FACTS: Final = (
    "completed", "failed", "cancelled", "running", "paused", "hung", "gpus-idle", "rank-restarted",
    "rolled-back", "optimizer-state-lost", "protected", "checkpoint-failed",
)  # fmt: skip
"""Facts about jobs that can be asked for."""
DEFAULT: Final = ("failed", "hung")
SEND_S: Final = 10.0
WAIT_MAX_S: Final = 60.0
AGAIN: Final = frozenset({408, 425, 429})
"""HTTP statuses below 500 after which the same notice is sent again."""
Note = Callable[[str], None]


class Notice(msgspec.Struct, frozen=True):
    """Tells one fact, as JSON. `text` alone is what chat programs show; `sequence` is the fact's
    number, the same when it is sent again."""

    text: str
    job: str
    fact: str
    at_s: float
    sequence: int


class _Kept(msgspec.Struct):
    """The state file."""

    sequence: int


class _Stay(HTTPRedirectHandler):
    """Follows no redirection: a notice goes to the address that was given."""

    def redirect_request(self, *_: Any) -> None:
        return None


_opener: Final = build_opener(_Stay)


class Refused(Exception):
    """The receiver does not take this notice."""


def check_address(url: str) -> None:
    """Raises ConfigRejected."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigRejected(f"--to {url!r}: give an address such as https://chat.example/hooks/1")


def notice(told: Told, wanted: Sequence[str], job: str) -> Notice | None:
    """Return what to send of a fact; None: nothing."""
    fact = str(getattr(told.fact, "fact", ""))
    about = str(getattr(told.fact, "job", ""))
    is_of_a_job = told.kept.subject.split(".")[-3:-2] == ["job"]
    if not is_of_a_job or fact not in wanted or (job and about != job):
        return None
    return Notice(told.text, about, fact, told.kept.at_s, told.kept.sequence)


def request(url: str, notice: Notice, secret: bytes) -> Request:
    """Make the request; with a secret it is signed: HMAC-SHA256 of the body, in hexadecimal."""
    body = msgspec.json.encode(notice)
    headers = {
        "Content-Type": "application/json",
        "User-Agent": "slackwater",
        "Idempotency-Key": f"slackwater-{notice.sequence}",
    }
    if secret:
        signed = hmac.new(secret, body, hashlib.sha256).hexdigest()
        headers["X-Slackwater-Signature"] = f"sha256={signed}"
    return Request(url, body, headers, method="POST")  # noqa: S310 (check_address)


def post(url: str, notice: Notice, secret: bytes) -> None:
    """Send it. Raises Refused, and Retryable where it may be taken later."""
    try:
        with _opener.open(request(url, notice, secret), timeout=SEND_S):
            pass
    except HTTPError as error:
        error.close()
        if error.code < 500 and error.code not in AGAIN:
            raise Refused(f"HTTP {error.code}") from None
        raise Retryable(f"HTTP {error.code}", _after(error)) from None
    except (URLError, TimeoutError, OSError) as error:
        raise Retryable(str(getattr(error, "reason", error))) from None


def _after(error: HTTPError) -> float:
    """Return for how long the receiver wants to be left alone."""
    text = error.headers.get("Retry-After", "") if error.headers else ""
    return min(float(text), WAIT_MAX_S) if text.isdigit() else 1.0


async def notify(
    client: Client,
    url: str,
    *,
    wanted: Sequence[str],
    job: str = "",
    secret: bytes = b"",
    state: Path | None = None,
    note: Note = lambda _: None,
    sent: Callable[[Notice], None] = lambda _: None,
) -> None:
    """Send notices from now on until cancelled. `state`: the file that says which fact was told
    last, so that a restart goes on after it; None: begin with what comes from now on. Raises
    ConfigRejected where the file cannot be used."""
    after = _read(state)
    while True:
        if after is None:
            after = await _newest(client)
        try:
            facts = happened.told(client, "", 0.0, after, follow=True)
            async with aclosing(facts) as told:
                async for each in told:
                    found = notice(each, wanted, job)
                    if found is not None and await _sent(client, url, found, secret, note):
                        sent(found)
                    after = each.kept.sequence
                    if found is not None:
                        _write(state, after)
        except Retryable as error:
            note(f"facts cannot be read: {error}")
            await asyncio.sleep(error.retry_after_s)


async def _sent(client: Client, url: str, found: Notice, secret: bytes, note: Note) -> bool:
    """Send it until it is taken or refused. Return whether it was taken."""
    wait_s = 1.0
    while True:
        try:
            await asyncio.to_thread(post, url, found, secret)
        except Refused as error:
            note(f"{found.job} {found.fact} is not taken: {error}")
            return False
        except Retryable as error:
            pause_s = max(wait_s, error.retry_after_s)
            note(f"{found.job} {found.fact} is sent again in {pause_s:g} s: {error}")
            await client.clock.sleep_until(client.clock.now_s() + pause_s)
            wait_s = min(2 * wait_s, WAIT_MAX_S)
        else:
            return True


async def _newest(client: Client) -> int:
    """Return the number of the newest fact; 0: there is none."""
    past = await happened.recent(client, "", 1, routine=True)
    return past[-1].kept.sequence if past else 0


def _read(state: Path | None) -> int | None:
    if state is None or not state.exists():
        return None
    try:
        return msgspec.json.decode(state.read_bytes(), type=_Kept).sequence
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigRejected(f"{state}: {error}; mend it, or remove it to begin anew") from error


def _write(state: Path | None, sequence: int) -> None:
    if state is not None:
        write_private(state, msgspec.json.encode(_Kept(sequence)).decode() + "\n")
