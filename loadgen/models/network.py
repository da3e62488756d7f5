"""A network as it is built layer by layer: its trainable tensors, and the work of each layer.

A builder walks the published architecture and lets every layer add its tensors and its
multiply-adds of one forward pass (one image, or one sequence). So the list of tensors is a
consequence of the architecture and never typed in, and a layer's share of the computation follows
from its spatial size. Batch-norm moving statistics are left out: workers never push them.
"""

from dataclasses import dataclass
from math import ceil, prod
from typing import Literal

from slackwater.schemas.tensors import TensorSpec

Padding = Literal["same", "valid"]
Norm = Literal["none", "bias", "shift", "scale-shift"]
"""The layer after a convolution: nothing, a bias of its own, or batch normalisation that learns its
shift only (Inception: the next layer undoes any scale) or scale and shift (ResNet)."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One step of the forward pass; the backward pass visits layers in reverse.

    `forward_share` is this layer's part of the network's multiply-adds: the shares sum to 1.
    """

    name: str
    tensors: tuple[int, ...]
    """Indices into the model's tensor list, ascending; each tensor belongs to one layer."""
    multiply_adds: float
    forward_share: float


@dataclass(frozen=True, slots=True)
class FeatureMap:
    """The shape that flows between layers of a convolutional network."""

    channels: int
    height: int
    width: int


class Network:
    """Collects tensors and layers in forward order while a builder calls its methods."""

    def __init__(self) -> None:
        self._tensors: list[TensorSpec] = []
        self._layers: list[tuple[str, tuple[int, ...], float]] = []
        self.batch_norms = 0

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        return tuple(self._tensors)

    def layers(self) -> tuple[Layer, ...]:
        total = sum(work for _, _, work in self._layers)
        return tuple(
            Layer(name, tensors, work, work / total) for name, tensors, work in self._layers
        )

    def layer(self, name: str, multiply_adds: float, **shapes: tuple[int, ...]) -> None:
        """Add a layer with the trainable tensors `name.<key>` of the given shapes."""
        first = len(self._tensors)
        self._tensors += [
            TensorSpec(name=f"{name}.{part}", shape=shape) for part, shape in shapes.items()
        ]
        self._layers.append((name, tuple(range(first, len(self._tensors))), multiply_adds))

    def conv(
        self,
        name: str,
        x: FeatureMap,
        channels: int,
        kernel: int | tuple[int, int],
        stride: int = 1,
        padding: Padding = "same",
        norm: Norm = "bias",
    ) -> FeatureMap:
        kernel_h, kernel_w = (kernel, kernel) if isinstance(kernel, int) else kernel
        out = FeatureMap(
            channels,
            _extent(x.height, kernel_h, stride, padding),
            _extent(x.width, kernel_w, stride, padding),
        )
        weight = (channels, x.channels, kernel_h, kernel_w)
        shapes: dict[str, tuple[int, ...]] = {"weight": weight}
        if norm == "bias":
            shapes["bias"] = (channels,)
        elif norm != "none":
            self.batch_norms += 1
            if norm == "scale-shift":
                shapes["scale"] = (channels,)
            shapes["shift"] = (channels,)
        self.layer(name, float(prod(weight) * out.height * out.width), **shapes)
        return out

    def dense(self, name: str, inputs: int, outputs: int) -> int:
        """A fully connected layer with bias; returns its number of outputs."""
        self.layer(name, float(inputs * outputs), weight=(outputs, inputs), bias=(outputs,))
        return outputs


def pool(x: FeatureMap, kernel: int, stride: int, padding: Padding = "valid") -> FeatureMap:
    return FeatureMap(
        x.channels,
        _extent(x.height, kernel, stride, padding),
        _extent(x.width, kernel, stride, padding),
    )


def concat(*branches: FeatureMap) -> FeatureMap:
    """Branches side by side: channels add up, the spatial size must agree."""
    sizes = {(branch.height, branch.width) for branch in branches}
    if len(sizes) != 1:
        raise ValueError(f"branches of different sizes cannot be joined: {sorted(sizes)}")
    ((height, width),) = sizes
    return FeatureMap(sum(branch.channels for branch in branches), height, width)


def flat(x: FeatureMap) -> int:
    return x.channels * x.height * x.width


def _extent(size: int, kernel: int, stride: int, padding: Padding) -> int:
    if padding == "same":
        return ceil(size / stride)
    return (size - kernel) // stride + 1
