"""ResNet-50, -101 and -152: He et al. (2016), table 1, bottleneck blocks with projections.

As published, a stage halves the image in the first 1x1 convolution of its first block (later
re-implementations moved that to the 3x3, which changes the work but no tensor).
"""

from slackwater.loadgen.models.network import FeatureMap, Network, pool

RESNET_BLOCKS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}


def resnet(depth: int) -> Network:
    net = Network()
    x = net.conv("conv1", FeatureMap(3, 224, 224), 64, 7, stride=2, norm="scale-shift")
    x = pool(x, 3, 2, padding="same")
    for stage, blocks in enumerate(RESNET_BLOCKS[depth]):
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            x = _bottleneck(net, f"conv{stage + 2}_{block + 1}", x, 64 << stage, stride)
    net.dense("fc", x.channels, 1000)
    return net


def _bottleneck(net: Network, name: str, x: FeatureMap, width: int, stride: int) -> FeatureMap:
    y = net.conv(f"{name}.a", x, width, 1, stride=stride, norm="scale-shift")
    y = net.conv(f"{name}.b", y, width, 3, norm="scale-shift")
    y = net.conv(f"{name}.c", y, 4 * width, 1, norm="scale-shift")
    if x.channels != y.channels:
        net.conv(f"{name}.projection", x, 4 * width, 1, stride=stride, norm="scale-shift")
    return y
