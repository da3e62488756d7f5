"""How a channel begins: what a hello must be, and what a failed connect means to the caller."""

import ssl

from slackwater.common.base import limits
from slackwater.common.base.errors import (
    AccessRefused,
    ConfigRejected,
    DeadlineExceeded,
    DecodeRejected,
    Rejected,
    Unavailable,
)
from slackwater.common.transport import wire


def check_hello(header: wire.Header) -> None:
    """Raises DecodeRejected when it is not a hello, Rejected when it is another version's."""
    if header.kind != wire.HELLO:
        raise DecodeRejected(f"a first record of kind {header.kind}, a hello was expected")
    if header.handle != wire.VERSION:
        raise Rejected(
            f"wire version {header.handle}, this side speaks {wire.VERSION}: "
            "run the same release on both"
        )


def check_hello_size(hello: bytes) -> None:
    """Raises Rejected."""
    if len(hello) > limits.FRAME_BYTES_MAX:
        raise Rejected(f"a hello of {len(hello)} bytes, at most {limits.FRAME_BYTES_MAX} fit")


def connect_error(error: BaseException, address: str, deadline_s: float) -> BaseException:
    """A failed connect as one of our errors."""
    match error:
        case TimeoutError():
            return DeadlineExceeded(f"{address} did not answer within {deadline_s:g} s")
        case ssl.SSLError():
            return Unavailable(f"{address} gives no encrypted connection: {_of_tls(error)}")
        case OSError():
            return Unavailable(f"nobody listens on {address}: {error}")
        case DecodeRejected():
            return Unavailable(f"{address} does not speak this protocol: {error}")
        case Rejected() if not isinstance(error, AccessRefused | ConfigRejected):
            return AccessRefused(str(error))
        case _:
            return error


def _of_tls(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        said = error.verify_message.rstrip(".")
        return f"{said}; is its authority in `ca`, and its host in its certificate?"
    return f"{error}; does it speak tls there, and is its certificate valid?"
