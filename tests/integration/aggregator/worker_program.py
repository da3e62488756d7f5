"""A training program to be killed: python worker_program.py URL RANK LAST TRANSPORT RESULT.

Trains job j1's three tensors until iteration LAST and saves the parameters. Its gradients depend on
rank and iteration alone: started again, it goes on where the job is.
"""

import sys
from functools import cache

import numpy as np

from slackwater.agent import Agent
from slackwater.schemas.tensors import UpdateRule

SIZES = {"embed": 300_007, "mlp.w": 270_001, "mlp.b": 20_011}


@cache
def row(name: str) -> np.ndarray:
    rng = np.random.Generator(np.random.PCG64([len(name), ord(name[-1])]))
    return rng.standard_normal(SIZES[name] + 65_536, dtype=np.float32)


def gradient(name: str, rank: int, iteration: int) -> np.ndarray:
    """Return the same gradient as the tests' own workers have."""
    first = (131 * iteration + 7919 * rank) % 65_536
    return row(name)[first : first + SIZES[name]]


def main(url: str, rank: int, last: int, transport: str, result: str) -> None:
    tensors = {name: np.linspace(-1, 1, size, dtype=np.float32) for name, size in SIZES.items()}
    with Agent(
        url=url, job="j1", rank=rank, workers=2, tensors=tensors, transport=transport,
        update=UpdateRule(name="adam", learning_rate=0.01), deadline_s=60.0,
    ) as agent:  # fmt: skip
        agent.wait()
        iteration = agent.iteration
        while iteration < last:
            iteration += 1
            agent.step({name: gradient(name, rank, iteration) for name in SIZES})
        np.savez(result, **agent.parameters())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5])
