"""The channels of devices: who may come, what they say, what they are told and granted.

A frame that is not one of our messages ends its channel: the device finds its slabs again by a
claim, or it was none of ours.
"""

import itertools
from dataclasses import dataclass, field
from typing import Final

import structlog

from slackwater.common.base import codec, limits
from slackwater.common.base.errors import AccessRefused, DecodeRejected, Rejected, Unavailable
from slackwater.common.base.rare_log import RareLog
from slackwater.common.domains.memory import frames, trailer
from slackwater.common.shell.config import is_one_of
from slackwater.common.shell.definition import Port
from slackwater.common.transport.base import Channel, Offering
from slackwater.common.transport.region import Region
from slackwater.schemas.memory import DeviceHello, NotMapped, SlabId, SlabMapped, ToDevice
from slackwater.services.slabd.effects import CloseSession, SendToDevice
from slackwater.services.slabd.events import Heard, SessionClosed, SessionOpened

MAPPING: Final = frozenset(("shm",))
"""Transports between processes of one host, which map the lender's memory: there the kernel says
who the peer is, and the fence word protects; elsewhere a token and the end of the channel do."""
_log = structlog.get_logger()


@dataclass(slots=True)
class Session:
    channel: Channel
    kind: str
    device: str
    keys: dict[SlabId, bytes] = field(default_factory=dict)


class Sessions:
    def __init__(self, *cluster_tokens: str, mapping: frozenset[str] = MAPPING) -> None:
        self._tokens = cluster_tokens
        self._mapping = mapping
        self._numbers = itertools.count(1)
        self._port: Port | None = None
        self._sessions: dict[int, Session] = {}

    def begin(self, port: Port) -> None:
        self._port = port
        self._strangers = RareLog(_log, port.now_s)

    def __len__(self) -> int:
        return len(self._sessions)

    # Devices come and go --------------------------------------------------------------------------

    def accept(self, kind: str, hello: bytes) -> None:
        """Raises AccessRefused, Unavailable."""
        if len(self._sessions) >= limits.LENDER_DEVICES_MAX:
            raise Unavailable(f"{limits.LENDER_DEVICES_MAX} devices are connected here")
        found = _decode(hello)
        if kind not in self._mapping and not is_one_of(found.token, self._tokens):
            raise AccessRefused(
                f"device {found.device} shows another cluster_token than this lender's"
            )

    async def serve(self, kind: str, channel: Channel) -> None:
        """The life of one channel."""
        port = self._port
        assert port is not None
        hello = _decode(channel.hello)
        number = next(self._numbers)
        self._sessions[number] = Session(channel, kind, hello.device)
        port.post(SessionOpened(number, hello))
        try:
            while True:
                port.post(Heard(number, frames.to_lender(await channel.receive())))
        except Unavailable:
            return
        except DecodeRejected as error:
            port.count("frames_refused")
            self._strangers.warning("device.refused", device=hello.device, reason=str(error))
        finally:
            await channel.close()
            del self._sessions[number]
            port.post(SessionClosed(number))

    async def close(self, effect: CloseSession) -> None:
        found = self._sessions.get(effect.session)
        if found is not None:
            await found.channel.close()

    # Messages and grants --------------------------------------------------------------------------

    def send(self, effect: SendToDevice) -> None:
        self._send(effect.session, effect.message)

    def _send(self, session: int, message: ToDevice) -> None:
        """A device that does not take its frames is as good as gone: deadlines see to the rest."""
        found = self._sessions.get(session)
        if found is None or self._port is None:
            return
        try:
            found.channel.send(frames.pack(message))
        except Unavailable:
            self._port.count("frames_unsent")

    def grant(
        self, session: int, request: int, identity: trailer.SlabIdentity, region: Region
    ) -> None:
        """MR_INFO."""
        found = self._sessions.get(session)
        if found is None:
            return
        try:
            channel = found.channel
            key = channel.offer(region) if isinstance(channel, Offering) else channel.grant(region)
        except (Unavailable, Rejected) as error:
            self._send(session, NotMapped(request=request, reason=str(error)))
            return
        found.keys[identity.slab] = key
        message = SlabMapped(
            request=request,
            slab=identity.slab,
            generation=identity.generation,
            slab_bytes=identity.slab_bytes,
            key=key,
        )
        self._send(session, message)

    def maps(self, session: int) -> bool:
        """Say whether its device sees the lender's memory itself."""
        found = self._sessions.get(session)
        return found is not None and found.kind in self._mapping

    def revoke(self, session: int, slab: SlabId) -> None:
        found = self._sessions.get(session)
        if found is not None and (key := found.keys.pop(slab, None)) is not None:
            found.channel.revoke(key)

    async def fence_off(self, session: int, slab: SlabId, forced: bool) -> None:
        """Keep this channel from reaching the slab. By force, and where the peer does not map it,
        the channel ends: an answer may be on its way out of the memory."""
        found = self._sessions.get(session)
        self.revoke(session, slab)
        if forced and found is not None and found.kind not in self._mapping:
            await found.channel.close()


def _decode(hello: bytes) -> DeviceHello:
    try:
        found: DeviceHello = codec.decode(hello, DeviceHello)
    except DecodeRejected as error:
        raise AccessRefused(f"no device's hello: {error}") from error
    return found
