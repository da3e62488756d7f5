"""Devices by name: which memory a region may lie in besides the host's."""

import threading
from typing import Final

from slackwater.common.base.errors import ConfigRejected
from slackwater.common.transport.fake_gpu import FakeDevice
from slackwater.common.transport.gpu import Device
from slackwater.common.transport.gpu_cuda import CudaDevice

DEVICES: Final = ("cuda", "cuda:<n>", "fake")
_FORMER_NAMES: Final = {"double": "fake"}
_devices: Final[dict[str, Device]] = {}
_lock: Final = threading.RLock()


def device_named(name: str) -> Device:
    """Return the device of that name, one object a process.

    `double`, the fake's name until 0.2.0, still means it. Raises ConfigRejected for a name that is
    unknown, or a device that is not there.
    """
    name = _FORMER_NAMES.get(name, name)
    with _lock:
        if name not in _devices:
            if name == "fake":
                _devices[name] = FakeDevice()
            elif name == "cuda" or (name.startswith("cuda:") and name[5:].isdecimal()):
                _devices[name] = CudaDevice(int(name[5:] or 0))
            else:
                raise ConfigRejected(f"device {name!r} is unknown: give one of {DEVICES}, or none")
        return _devices[name]
