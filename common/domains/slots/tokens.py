"""The token by which an aggregator knows one process of one rank of a job.

Controller and aggregators share the job's secret. An Agent is told the token of its own process
alone: it opens no other rank's slot, and a process that came after it closes the slot to it.
"""

import hmac


def process_token(secret: str, rank: int, attempt: int) -> str:
    """Return the token of the rank's process number `attempt` (0: started by hand), in hex: an
    HMAC by SHA-256. `secret`: JobPlan.token, which is the job's and its run's."""
    return hmac.digest(secret.encode(), f"{rank}.{attempt}".encode(), "sha256").hex()
