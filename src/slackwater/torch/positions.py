"""Random generators, and the place in an epoch: what a program that goes on must find as it was.

The order of an epoch's batches is drawn when the epoch begins. So an epoch is gone on with from the
generators as they were then, past the batches that were used, whose samples are not read again;
then come the generators as they were at the checkpoint.
"""

import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset


def random_states() -> dict[str, Any]:
    """Return the state of Python's, numpy's and torch's generators, the present GPU's included, as
    torch.load(weights_only=True) takes it."""
    _, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (torch.from_numpy(np.array(keys, np.int64)), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """Set the generators as `random_states` returned them."""
    random.setstate(states["python"])
    keys, *rest = states["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"].clone())
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"].clone())


def epoch_state(loader: Any) -> dict[str, Any]:
    """Return the generators that the order of the loader's next epoch comes from."""
    return {"random": random_states(), "own": [g.get_state() for g in _generators(loader)]}


def resumed(loader: Any, begun: dict[str, Any], used: int, then: Callable[[], None]) -> Any:
    """Return the epoch that began with the generators `begun`, without its first `used` batches.
    `then` is called before the first of the others is drawn."""
    set_random_states(begun["random"])
    for generator, state in zip(_generators(loader), begun["own"], strict=False):
        generator.set_state(state.clone())
    sampler = getattr(loader, "batch_sampler", None)
    if sampler is None or isinstance(loader.dataset, IterableDataset):
        source = iter(loader)  # It cannot be told what to leave out.
        for _ in islice(source, used):
            continue
        then()
        return source
    return iter(_like(loader, _Rest(sampler, used, then)))


def _like(loader: Any, sampler: Any) -> Any:
    """Make the same loader with other batches."""
    return DataLoader(
        loader.dataset,
        batch_sampler=sampler,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
    )


class _Rest:
    """A batch sampler without the batches that were used."""

    def __init__(self, sampler: Any, used: int, then: Callable[[], None]) -> None:
        self._sampler, self._used, self._then = sampler, used, then

    def __iter__(self) -> Iterator[Any]:
        source = iter(self._sampler)
        for _ in islice(source, self._used):
            continue
        self._then()
        yield from source

    def __len__(self) -> int:
        return max(0, len(self._sampler) - self._used)


def _generators(loader: Any) -> list[torch.Generator]:
    """List the generators that the loader and its samplers have for themselves, each once."""
    batches = getattr(loader, "batch_sampler", None)
    owners = (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
    found = (getattr(owner, "generator", None) for owner in owners)
    return list({id(each): each for each in found if each is not None}.values())
