"""Fencing of commands: a command of an instance that was replaced is refused.

Each start of a service has an epoch one higher than the last (its epoch record says so), and every
message carries it. A receiver remembers the highest epoch of each sender and refuses a command
with a lower one. A person's request carries no sender and is not fenced. Safety rests on this and
on the buckets' fence, never on a lease or a clock.
"""

from collections import OrderedDict

from slackwater.common.base import limits
from slackwater.schemas.base import Message


def sender_name(service: str, id: str) -> str:
    return f"{service}.{id}"


class Fence:
    """The highest epoch seen of each sender (of the SENDERS_MAX that were heard last)."""

    def __init__(self) -> None:
        self._highest: OrderedDict[str, int] = OrderedDict()

    def refuses(self, message: Message) -> int:
        """The higher epoch that stands against this message; 0: it counts."""
        sender, epoch = message.sender, message.epoch
        if not sender:
            return 0
        highest = self._highest.get(sender, 0)
        if epoch < highest:
            return highest
        if epoch > highest:
            self._highest[sender] = epoch
            self._highest.move_to_end(sender)
            if len(self._highest) > limits.SENDERS_MAX:
                self._highest.popitem(last=False)
        return 0
