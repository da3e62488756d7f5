"""GoogLeNet, Inception-v3 and Inception-v4, auxiliary classifiers left out.

GoogLeNet: Szegedy et al. (2015), table 1. Inception-v3: Szegedy et al. (2016), table 1 and figures
5 to 7 as their authors released it. Inception-v4: Szegedy et al. (2017), figures 3 to 9. The papers
we follow counted Inception-v4 as 599 variables: 149 convolutions with a weight, a learnt shift and
two moving statistics each, the classifier's two, and a step counter.
"""

from slackwater.loadgen.models.network import FeatureMap, Network, Padding, concat, pool

Step = tuple[int, int | tuple[int, int]]
"""(channels, kernel) of one convolution in a branch."""

GOOGLENET_MODULES: dict[str, tuple[int, int, int, int, int, int]] = {
    "3a": (64, 96, 128, 16, 32, 32),
    "3b": (128, 128, 192, 32, 96, 64),
    "4a": (192, 96, 208, 16, 48, 64),
    "4b": (160, 112, 224, 24, 64, 64),
    "4c": (128, 128, 256, 24, 64, 64),
    "4d": (112, 144, 288, 32, 64, 64),
    "4e": (256, 160, 320, 32, 128, 128),
    "5a": (256, 160, 320, 32, 128, 128),
    "5b": (384, 192, 384, 48, 128, 128),
}
"""1x1; 3x3 reduction, 3x3; 5x5 reduction, 5x5; pooling projection."""


def googlenet() -> Network:
    net = Network()
    x = net.conv("conv1", FeatureMap(3, 224, 224), 64, 7, stride=2)
    x = net.conv("conv2.reduce", pool(x, 3, 2, "same"), 64, 1)
    x = pool(net.conv("conv2", x, 192, 3), 3, 2, "same")
    for name, (one, reduce3, three, reduce5, five, projection) in GOOGLENET_MODULES.items():
        if name in ("4a", "5a"):
            x = pool(x, 3, 2, "same")
        x = concat(
            net.conv(f"{name}.1x1", x, one, 1),
            net.conv(f"{name}.3x3", net.conv(f"{name}.3x3.reduce", x, reduce3, 1), three, 3),
            net.conv(f"{name}.5x5", net.conv(f"{name}.5x5.reduce", x, reduce5, 1), five, 5),
            net.conv(f"{name}.pool", x, projection, 1),
        )
    net.dense("fc", x.channels, 1000)
    return net


def inception3() -> Network:
    net = Network()
    x = _conv(net, "conv1", FeatureMap(3, 299, 299), 32, 3, 2, "valid")
    x = _conv(net, "conv2", x, 32, 3, padding="valid")
    x = pool(_conv(net, "conv3", x, 64, 3), 3, 2)
    x = _conv(net, "conv4", x, 80, 1)
    x = pool(_conv(net, "conv5", x, 192, 3, padding="valid"), 3, 2)
    for index, projection in enumerate((32, 64, 64)):
        x = _parallel(
            net,
            f"mixed35_{index}",
            x,
            [(64, 1)],
            [(48, 1), (64, 5)],
            [(64, 1), (96, 3), (96, 3)],
            [(projection, 1)],
        )
    x = _reduction(net, "reduce35", x, [(384, 3)], [(64, 1), (96, 3), (96, 3)])
    for index, width in enumerate((128, 160, 160, 192)):
        x = _parallel(
            net,
            f"mixed17_{index}",
            x,
            [(192, 1)],
            [(width, 1), (width, (1, 7)), (192, (7, 1))],
            [(width, 1), (width, (7, 1)), (width, (1, 7)), (width, (7, 1)), (192, (1, 7))],
            [(192, 1)],
        )
    x = _reduction(
        net, "reduce17", x, [(192, 1), (320, 3)], [(192, 1), (192, (1, 7)), (192, (7, 1)), (192, 3)]
    )
    for index in range(2):
        name = f"mixed8_{index}"
        x = concat(
            _chain(net, f"{name}.0", x, [(320, 1)]),
            _forked(net, f"{name}.1", x, [(384, 1)], 384),
            _forked(net, f"{name}.2", x, [(448, 1), (384, 3)], 384),
            _chain(net, f"{name}.3", x, [(192, 1)]),
        )
    net.dense("fc", x.channels, 1000)
    return net


def inception4() -> Network:
    net = Network()
    x = _inception4_stem(net)
    for index in range(4):
        x = _parallel(
            net,
            f"mixed35_{index}",
            x,
            [(96, 1)],
            [(96, 1)],
            [(64, 1), (96, 3)],
            [(64, 1), (96, 3), (96, 3)],
        )
    x = _reduction(net, "reduce35", x, [(384, 3)], [(192, 1), (224, 3), (256, 3)])
    for index in range(7):
        x = _parallel(
            net,
            f"mixed17_{index}",
            x,
            [(128, 1)],
            [(384, 1)],
            [(192, 1), (224, (1, 7)), (256, (7, 1))],
            [(192, 1), (192, (1, 7)), (224, (7, 1)), (224, (1, 7)), (256, (7, 1))],
        )
    x = _reduction(
        net, "reduce17", x, [(192, 1), (192, 3)], [(256, 1), (256, (1, 7)), (320, (7, 1)), (320, 3)]
    )
    for index in range(3):
        name = f"mixed8_{index}"
        x = concat(
            _chain(net, f"{name}.0", x, [(256, 1)]),
            _chain(net, f"{name}.1", x, [(256, 1)]),
            _forked(net, f"{name}.2", x, [(384, 1)], 256),
            _forked(net, f"{name}.3", x, [(384, 1), (448, (1, 3)), (512, (3, 1))], 256),
        )
    net.dense("fc", x.channels, 1000)
    return net


def _inception4_stem(net: Network) -> FeatureMap:
    x = _conv(net, "stem1", FeatureMap(3, 299, 299), 32, 3, 2, "valid")
    x = _conv(net, "stem2", x, 32, 3, padding="valid")
    x = _conv(net, "stem3", x, 64, 3)
    x = concat(pool(x, 3, 2), _conv(net, "stem4", x, 96, 3, 2, "valid"))
    short = _chain(net, "stem5.0", x, [(64, 1)])
    tall = _chain(net, "stem5.1", x, [(64, 1), (64, (7, 1)), (64, (1, 7))])
    x = concat(
        _conv(net, "stem5.0.out", short, 96, 3, padding="valid"),
        _conv(net, "stem5.1.out", tall, 96, 3, padding="valid"),
    )
    return concat(pool(x, 3, 2), _conv(net, "stem6", x, 192, 3, 2, "valid"))


def _conv(
    net: Network,
    name: str,
    x: FeatureMap,
    channels: int,
    kernel: int | tuple[int, int],
    stride: int = 1,
    padding: Padding = "same",
) -> FeatureMap:
    return net.conv(name, x, channels, kernel, stride, padding, norm="shift")


def _chain(net: Network, name: str, x: FeatureMap, steps: list[Step]) -> FeatureMap:
    for index, (channels, kernel) in enumerate(steps):
        x = _conv(net, f"{name}.{index}", x, channels, kernel)
    return x


def _parallel(net: Network, name: str, x: FeatureMap, *branches: list[Step]) -> FeatureMap:
    """A mixed block: branches side by side (a pooling with stride 1 changes no shape)."""
    return concat(*(_chain(net, f"{name}.{i}", x, steps) for i, steps in enumerate(branches)))


def _reduction(net: Network, name: str, x: FeatureMap, *branches: list[Step]) -> FeatureMap:
    """A block that halves the image: each branch's last convolution and a pooling stride by 2."""
    outputs = []
    for index, steps in enumerate(branches):
        y = _chain(net, f"{name}.{index}", x, steps[:-1])
        channels, kernel = steps[-1]
        outputs.append(_conv(net, f"{name}.{index}.out", y, channels, kernel, 2, "valid"))
    return concat(*outputs, pool(x, 3, 2))


def _forked(net: Network, name: str, x: FeatureMap, steps: list[Step], channels: int) -> FeatureMap:
    """A chain that ends in a 1x3 and a 3x1 convolution side by side."""
    y = _chain(net, name, x, steps)
    return concat(
        _conv(net, f"{name}.1x3", y, channels, (1, 3)),
        _conv(net, f"{name}.3x1", y, channels, (3, 1)),
    )
