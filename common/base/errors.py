"""The errors, named by what the caller does next.

    SlackwaterError
    ├── Retryable            try again later; `retry_after_s` says when
    │   ├── Unavailable      nobody answered, or the peer is gone
    │   │   └── NobodyThere  the bus works, and no such service is on it
    │   └── DeadlineExceeded an answer may still have been acted on
    ├── Rejected             do not try again as it is: the request itself is at fault
    │   ├── DecodeRejected   the bytes are not a message of the expected type
    │   │   └── VersionRejected  a newer release wrote them
    │   ├── ConfigRejected   a configuration file or option cannot be used
    │   ├── AccessRefused    wrong token, foreign region, out of bounds
    │   └── GradientRefused  a push was refused, nothing was applied
    └── Fatal                this process cannot go on; its supervisor starts it anew
        ├── Breached         an event from outside broke the core; it is refused from now on
        └── Deposed          somebody with a higher epoch writes this service's records

Foreign exceptions are mapped to these where the library is called, and nowhere else.
"""

DECODE_TEXT_MAX = 300


class SlackwaterError(Exception):
    """The root. `str(error)` is one line: what was wrong, and the remedy."""


class Retryable(SlackwaterError):
    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(Retryable):
    pass


class NobodyThere(Unavailable):
    pass


class DeadlineExceeded(Retryable):
    pass


class Rejected(SlackwaterError):
    status = 400
    """The kind of refusal by HTTP's codes, as whoever refused it said (schemas.base.Refused)."""


class Removed(Rejected):
    """A bucket or stream that was there is not any more."""


class RecordsMissing(Rejected):
    """A bucket does not hold what a witness of it says (common/store/witness.py)."""


class DecodeRejected(Rejected):
    """One line, and not all of it where the text quotes what a peer sent."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split())[:DECODE_TEXT_MAX])


class VersionRejected(DecodeRejected):
    pass


class ConfigRejected(Rejected):
    pass


class AccessRefused(Rejected):
    pass


class GradientRefused(Rejected):
    """A gradient of wrong shape or dtype, or with a non-finite value. Nothing was applied."""

    def __init__(self, job: str, tensor: str, worker: int, iteration: int, why: str) -> None:
        super().__init__(
            f"job {job}, tensor {tensor}, worker {worker}, iteration {iteration}: {why}; "
            "nothing was applied, push this iteration again with a good gradient"
        )
        self.job, self.tensor, self.worker, self.iteration = job, tensor, worker, iteration


class Fatal(SlackwaterError):
    pass


class Breached(Fatal):
    pass


class RolledBack(Fatal):
    """The store lost records that it had acknowledged: its file was cut off, or is an older copy.
    Their writer knows them still."""


class Deposed(Fatal):
    pass
