"""AlexNet and VGG: convolutions one after another, then three fully connected layers.

AlexNet is the single-tower form that the papers measured (Gu, dissertation, table 3.3: 235.9 MiB,
fc6 61 %): 64, 192, 384, 384 and 256 filters on a 227 x 227 image. VGG is Simonyan and Zisserman
(2015), table 1, columns A, D and E.
"""

from slackwater.loadgen.models.network import FeatureMap, Network, flat, pool

CLASSES = 1000

VGG_STAGES = {11: (1, 1, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
"""Convolutions before each of the five poolings; stage k has 64 * 2^k filters, at most 512."""


def alexnet() -> Network:
    net = Network()
    x = net.conv("conv1", FeatureMap(3, 227, 227), 64, 11, stride=4, padding="valid")
    x = net.conv("conv2", pool(x, 3, 2), 192, 5)
    x = net.conv("conv3", pool(x, 3, 2), 384, 3)
    x = net.conv("conv4", x, 384, 3)
    x = net.conv("conv5", x, 256, 3)
    _classifier(net, flat(pool(x, 3, 2)))
    return net


def vgg(depth: int) -> Network:
    net = Network()
    x = FeatureMap(3, 224, 224)
    for stage, convolutions in enumerate(VGG_STAGES[depth]):
        for index in range(convolutions):
            x = net.conv(f"conv{stage + 1}_{index + 1}", x, min(64 << stage, 512), 3)
        x = pool(x, 2, 2)
    _classifier(net, flat(x))
    return net


def _classifier(net: Network, features: int) -> None:
    hidden = net.dense("fc6", features, 4096)
    net.dense("fc8", net.dense("fc7", hidden, 4096), CLASSES)
