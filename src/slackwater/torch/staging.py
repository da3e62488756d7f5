"""A state's tensors, copied aside into memory that is there already.

Fresh memory costs the kernel twelve times what the copy costs, so a memfd is made and touched once,
by another thread, and each copy goes to the same place.
"""

import copy
import mmap
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

_ALIGNED_BYTES: Final = 64


def mapped(value: Any, of_tensor: Callable[[torch.Tensor], Any]) -> Any:
    """Copy the containers of a state, with `of_tensor` of each tensor in them."""
    if isinstance(value, torch.Tensor):
        return of_tensor(value)
    if isinstance(value, Mapping):
        made = OrderedDict((key, mapped(one, of_tensor)) for key, one in value.items())
        if hasattr(value, "_metadata"):  # A module's: the versions of its layers.
            made._metadata = value._metadata  # type: ignore[attr-defined]
            return made
        return dict(made)
    if type(value) in (list, tuple):
        return type(value)(mapped(one, of_tensor) for one in value)
    return copy.copy(value)


def state_bytes(state: Any) -> int:
    """Count the bytes that a staged copy of the state takes."""
    total = 0

    def add(tensor: torch.Tensor) -> None:
        nonlocal total
        total += _room(tensor)

    mapped(state, add)
    return total


class Staging:
    """Room for one copy of a state. Not for several threads at once."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._pinned = False

    def fit(self, nbytes: int, pinned: bool = False) -> None:
        """Have at least so many bytes, all touched. `pinned`: registered with CUDA, so that a GPU
        writes to them at its full speed."""
        memory = self._memory
        if memory is not None and len(memory) >= nbytes and self._pinned >= pinned:
            return
        self._memory = None
        whole = max(mmap.PAGESIZE, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        descriptor = os.memfd_create("slackwater-checkpoint", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(descriptor, 0, whole)
            memory = mmap.mmap(descriptor, whole)
        finally:
            os.close(descriptor)
        pages = torch.frombuffer(memory, dtype=torch.uint8)
        pages[:: mmap.PAGESIZE] = 0
        if pinned:
            torch.cuda.cudart().cudaHostRegister(pages.data_ptr(), whole, 0)
        self._memory, self._pinned = memory, pinned

    def copy(self, state: Any) -> Any:
        """Return the state with its tensors copied to here. Those of the copy before are
        overwritten: nobody may use them any more."""
        on_gpu = False
        self.fit(state_bytes(state))
        memory, end = self._memory, 0
        assert memory is not None
        copies: dict[tuple[Any, ...], torch.Tensor] = {}

        def put(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal end, on_gpu
            if tensor.layout is not torch.strided or tensor.is_quantized:
                return tensor.detach().cpu().clone()
            place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
            if place not in copies or not tensor.numel():  # Shared weights stay shared.
                copies[place] = made = _at(memory, end, tensor)
                made.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
                end += _room(tensor)
                on_gpu |= tensor.is_cuda
            return copies[place]

        staged = mapped(state, put)
        if on_gpu:
            torch.cuda.synchronize()
        return staged


def _at(memory: mmap.mmap, begin: int, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same shape that lies in the memory."""
    if not like.numel():
        return torch.empty(like.shape, dtype=like.dtype)
    flat = torch.frombuffer(memory, dtype=like.dtype, count=like.numel(), offset=begin)
    return flat.view(like.shape)


def _room(tensor: torch.Tensor) -> int:
    nbytes: int = tensor.numel() * tensor.element_size()
    return -(-nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
