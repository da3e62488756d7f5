"""Ask the bus which tenant this client's user is held to."""

from typing import Final

import msgspec

from slackwater.common.base.errors import Rejected, Retryable
from slackwater.common.bus.base import Bus
from slackwater.schemas.subjects import tenant_of as _tenant_in

_ABOUT_ME: Final = "$SYS.REQ.USER.INFO"
_ASK_S: Final = 1.0


class _Subjects(msgspec.Struct):
    allow: list[str] = []


class _Permissions(msgspec.Struct):
    publish: _Subjects | None = None


class _User(msgspec.Struct):
    permissions: _Permissions | None = None


class _About(msgspec.Struct):
    data: _User | None = None


async def tenant_of(bus: Bus) -> str:
    """Return the tenant that this user of the bus may act for; empty: it is not held to one, or the
    bus does not tell."""
    try:
        about = msgspec.json.decode(
            await bus.request(_ABOUT_ME, b"", timeout_s=_ASK_S), type=_About
        )
    except (Retryable, Rejected, msgspec.DecodeError):
        return ""
    may = about.data.permissions if about.data is not None else None
    allowed = may.publish.allow if may is not None and may.publish is not None else []
    return next(filter(None, map(_tenant_in, allowed)), "")
