"""An operator's drain outlives the daemon and its machine, which may be started anew in the course
of the maintenance: one record, there for as long as the drain is in force. Pure.

It is written at an operator's order only: lending and evicting wait for no bus (ADR 6).
"""

from collections.abc import Mapping
from typing import Final

from slackwater.common.base.effects import Persist
from slackwater.schemas.base import Record
from slackwater.schemas.memory import LenderId, LenderRecord

_KEY: Final = "drained"


def bucket(id: str) -> str:
    return f"lender_{id}"


def found(
    id: LenderId,
    records: Mapping[str, Mapping[str, Record]],
    damaged: Mapping[str, frozenset[str]],
) -> bool:
    """Among what the shell recovered. A damaged order stands: what it says is that it is there."""
    return any(_KEY in found.get(bucket(id), ()) for found in (records, damaged))


def keep(id: LenderId, now_s: float) -> Persist:
    return Persist(bucket(id), _KEY, LenderRecord(lender=id, drained_s=now_s))


def forget(id: LenderId) -> Persist:
    return Persist(bucket(id), _KEY, None)
