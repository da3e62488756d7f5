"""The networks that emulated jobs train: true tensor lists, and each layer's share of the work.

    tensors("VGG-19")                   38 tensors, 143,667,240 float32 parameters
    tensors("vgg19", bytes_scale=0.2)   the same names in the same order, a fifth of the elements
    layers("vgg19")                     forward order; layer.tensors index into tensors(...)

Counts and sizes are those of Gu's dissertation, tables 3.3 and 4.2, without the batch-norm
statistics and the step counter that its tensor counts include.
"""

import difflib
from collections.abc import Callable
from functools import cache, partial
from math import isfinite, prod

from slackwater.common.base.errors import Rejected
from slackwater.loadgen.models.inception import googlenet, inception3, inception4
from slackwater.loadgen.models.language import awd_lm, bert_large
from slackwater.loadgen.models.network import Layer, Network
from slackwater.loadgen.models.plain import alexnet, vgg
from slackwater.loadgen.models.resnet import resnet
from slackwater.schemas.tensors import TensorSpec

__all__ = [
    "Layer",
    "Network",
    "TensorSpec",
    "UnknownModel",
    "layers",
    "names",
    "network",
    "parameters",
    "resolve",
    "tensors",
]

_BUILDERS: dict[str, Callable[[], Network]] = {
    "alexnet": alexnet,
    "vgg11": partial(vgg, 11),
    "vgg16": partial(vgg, 16),
    "vgg19": partial(vgg, 19),
    "resnet50": partial(resnet, 50),
    "resnet101": partial(resnet, 101),
    "resnet152": partial(resnet, 152),
    "inception3": inception3,
    "inception4": inception4,
    "googlenet": googlenet,
    "awd-lm": awd_lm,
    "bert-large": bert_large,
}

_ALIASES = {
    "awdlstm": "awd-lm",
    "bert": "bert-large",
    "inceptionv1": "googlenet",
    "inceptionv3": "inception3",
    "inceptionv4": "inception4",
}
"""Other names in traces and papers, squashed as `_squash` does."""


class UnknownModel(Rejected):
    """No architecture of that name is built in."""

    def __init__(self, name: str) -> None:
        squashed = {_squash(known): known for known in _BUILDERS}
        near = difflib.get_close_matches(_squash(name), squashed, n=3, cutoff=0.6)
        hint = f"did you mean {', '.join(squashed[match] for match in near)}? " if near else ""
        super().__init__(f"unknown model {name!r}, {hint}known: {', '.join(_BUILDERS)}")
        self.name = name


def names() -> tuple[str, ...]:
    return tuple(_BUILDERS)


def resolve(name: str) -> str:
    """The canonical name: case, dashes and blanks are forgiven ("VGG-19", "Inception v3")."""
    squashed = _squash(name)
    for known in _BUILDERS:
        if _squash(known) == squashed:
            return known
    if squashed in _ALIASES:
        return _ALIASES[squashed]
    raise UnknownModel(name)


def network(name: str) -> Network:
    return _built(resolve(name))


def layers(name: str) -> tuple[Layer, ...]:
    """In forward order. Some layers compute without tensors; each tensor has exactly one layer."""
    return _layers(resolve(name))


def tensors(name: str, bytes_scale: float = 1.0) -> tuple[TensorSpec, ...]:
    """The trainable tensors (float32) in forward order.

    With `bytes_scale` below 1 every tensor is shrunk to about that part of its elements, at least
    one: a flat tensor of the same name, in the same place.
    """
    if not (isfinite(bytes_scale) and 0.0 < bytes_scale <= 1.0):
        raise Rejected(f"bytes_scale is {bytes_scale}; give a number above 0 and at most 1")
    return _scaled(resolve(name), bytes_scale)


def parameters(specs: tuple[TensorSpec, ...]) -> int:
    """How many numbers these tensors hold."""
    return sum(prod(spec.shape) for spec in specs)


def _squash(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum())


@cache
def _built(name: str) -> Network:
    return _BUILDERS[name]()


@cache
def _layers(name: str) -> tuple[Layer, ...]:
    return _built(name).layers()


@cache
def _scaled(name: str, bytes_scale: float) -> tuple[TensorSpec, ...]:
    whole = _built(name).tensors
    if bytes_scale == 1.0:
        return whole
    return tuple(
        TensorSpec(name=spec.name, shape=(max(1, round(prod(spec.shape) * bytes_scale)),))
        for spec in whole
    )
