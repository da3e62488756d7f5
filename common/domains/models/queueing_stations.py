"""The three stations of the queueing model at which tasks meet, and how its links share.

Lin et al. (2018), figure 6. Arrays over stations are in the order uplink, downlink, server: the
links first, because only they know the two kinds of sharing.
"""

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
UPLINK: Final = 0
DOWNLINK: Final = 1
SERVER: Final = 2
STATIONS: Final = 3
LINKS: Final = slice(0, 2)

Sharing = Callable[[Floats], Floats]
"""g of eq. 3, on an array of link utilisations: 1 where transfers share the link equally, 0 where
they go one after the other. Whoever calls it clips it to [0, 1]."""


def equal_share(utilization: Floats) -> Floats:
    return np.ones_like(utilization)


def one_by_one(utilization: Floats) -> Floats:
    return np.zeros_like(utilization)
