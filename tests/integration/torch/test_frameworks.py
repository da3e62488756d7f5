"""Training loops of three frameworks, none of them edited: aggregators add their gradients up, and
every loss and weight is what gloo gives, bit for bit.

Real processes. Two jobs of two ranks for each framework, which take the seconds in which four
processes import it on two cores; they train for less than one.
"""

from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import pytest_asyncio
from tests.faults.gpu_nodes import GpuNodes, gpu_nodes
from tests.integration.torch.test_unadapted_ddp import both_ways

pytestmark = [pytest.mark.live, pytest.mark.timeout(180), pytest.mark.asyncio(loop_scope="module")]

PACKAGES = {
    "lightning": ("pytorch_lightning", "make setup-torch"),
    "accelerate": ("accelerate", "make setup-torch"),
    "transformers": ("transformers", "pip install transformers==5.24.0; 130 MB, in no lock"),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def nodes() -> AsyncIterator[GpuNodes]:
    async with gpu_nodes(1, 2) as made:
        yield made


@pytest.mark.parametrize("framework", PACKAGES)
async def test_its_losses_and_weights_are_those_of_gloo(nodes: GpuNodes, framework: str) -> None:
    package, how = PACKAGES[framework]
    if find_spec(package) is None:  # Importing it here would take seconds.
        pytest.skip(f"{package} is not installed ({how})")
    program = Path(__file__).with_name(f"{framework}_program.py")
    shared, _ = await both_ways(nodes, framework, program)
    assert "aggregators add up the gradients of" in shared[0]
