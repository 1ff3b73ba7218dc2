"""ResNets: those for small pictures, those of the papers, and those with ImageNet's stem."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from torch import nn

from isofed.models.base import Network, norm_layer, vector_norm
from isofed.models.residual import PadShortcut, Residual

Shape = tuple[int, int, int]
Norm = Callable[[int], nn.Module]
Block = Callable[[int, int, int, Norm], Residual]  # channels in, planes, stride, norm


# --- ResNets of CIFAR: three stages of basic blocks, shortcuts without weights


def resnet8(shape: Shape, classes: int, norm: str = "batch") -> Network:
    """Three stages of one basic block with 16, 32 and 64 channels: small, with all that a method can ask for."""
    return _option_a(shape, classes, norm, blocks=1)


def resnet20(shape: Shape, classes: int, norm: str = "batch") -> Network:
    """Three stages of three basic blocks with 16, 32 and 64 channels; shortcuts without weights."""
    return _option_a(shape, classes, norm, blocks=3)


def resnet32(shape: Shape, classes: int, norm: str = "batch") -> Network:
    """As resnet20 with five blocks a stage."""
    return _option_a(shape, classes, norm, blocks=5)


def resnet56_basic(shape: Shape, classes: int, norm: str = "batch") -> Network:
    """As resnet20 with nine blocks a stage; not the ResNet-56 of FedAlign, which is resnet56."""
    return _option_a(shape, classes, norm, blocks=9)


def _option_a(shape: Shape, classes: int, norm: str, blocks: int) -> Network:
    def block(inside: int, planes: int, stride: int, make_norm: Norm) -> Residual:
        return Residual(_basic_branch(inside, planes, stride, make_norm), PadShortcut(stride) if stride > 1 else None)

    stages = _stages([blocks] * 3, (16, 32, 64), block, norm_layer(norm), _stem(shape[0], 16, norm), 16, expansion=1)
    network = Network(stages, average_pool(), nn.Linear(64, classes), width=64)
    for module in network.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            nn.init.kaiming_normal_(module.weight)
    return network


# --- ResNets with weighted shortcuts


def resnet56(shape: Shape, classes: int, norm: str = "batch") -> Network:
    """FedML's and FedAlign's: three stages of six bottlenecks with 64, 128 and 256 channels."""
    stages = _stages([6] * 3, (16, 32, 64), bottleneck, norm_layer(norm), _stem(shape[0], 16, norm), 16)
    return _scaled(Network(stages, average_pool(), nn.Linear(256, classes), width=256))


def resnet18(shape: Shape, classes: int, norm: str = "batch") -> Network:
    """For small pictures: a 3x3 stem without pooling, four stages of two basic blocks (FedDecorr, SphereFed)."""
    return _four_stages(shape, classes, norm, basic, stem="small")


def resnet18_imagenet(shape: Shape, classes: int, norm: str = "batch") -> Network:
    """ImageNet's stem, a 7x7 convolution and pooling, then four stages of two basic blocks (FedAlign)."""
    return _scaled(_four_stages(shape, classes, norm, basic, stem="imagenet"))


def resnet50_imagenet(shape: Shape, classes: int, norm: str = "batch") -> Network:
    """ImageNet's stem, then 3, 4, 6 and 3 bottlenecks."""
    return _scaled(_four_stages(shape, classes, norm, bottleneck, stem="imagenet"))


def feduv_resnet18(shape: Shape, classes: int, norm: str = "batch") -> Network:
    """FedUV's: a 3x3 stem, stride 2 in the first stage as well, and a projector of 512."""
    return _four_stages(shape, classes, norm, basic, stem="small", first_stride=2, project=512)


def feduv_resnet18_plain(shape: Shape, classes: int, norm: str = "batch") -> Network:
    """FedUV's as its text may be read: ResNet-18 for small pictures, and a projector of 512."""
    return _four_stages(shape, classes, norm, basic, stem="small", project=512)


def feduv_resnet50(shape: Shape, classes: int, norm: str = "batch") -> Network:
    """FedUV's: ImageNet's 7x7 stem without its pooling, and a projector of 2,048."""
    return _four_stages(shape, classes, norm, bottleneck, stem="unpooled", project=2048)


def moon_resnet50(shape: Shape, classes: int, norm: str = "batch") -> Network:
    """MOON's: a 3x3 stem without pooling, bottlenecks, and its projection head from 2,048 to 256."""
    network = _scaled(_four_stages(shape, classes, norm, bottleneck, stem="small"))
    network.projector = projection_head(2048)
    network.head, network.width = nn.Linear(256, classes), 256
    return network


def projection_head(inside: int, hidden: int | None = None, outside: int = 256) -> nn.Module:
    """MOON's: linear, ReLU, linear."""
    hidden = inside if hidden is None else hidden
    return nn.Sequential(nn.Linear(inside, hidden), nn.ReLU(), nn.Linear(hidden, outside))


def projector(inside: int, width: int, norm: str) -> nn.Module:
    """FedUV's: twice linear, norm, ReLU."""
    make = vector_norm(norm)
    return nn.Sequential(
        *(nn.Linear(inside, width), make(width), nn.ReLU()), *(nn.Linear(width, width), make(width), nn.ReLU())
    )


def _four_stages(
    shape: Shape,
    classes: int,
    norm: str,
    block: Block,
    stem: Literal["small", "unpooled", "imagenet"],
    first_stride: int = 1,
    project: int | None = None,
) -> Network:
    make_norm = norm_layer(norm)
    counts = (2, 2, 2, 2) if block is basic else (3, 4, 6, 3)
    outside = 512 * (1 if block is basic else 4)
    first = _stem(shape[0], 64, norm) if stem == "small" else _large_stem(shape[0], norm, pool=stem == "imagenet")
    stages = _stages(counts, (64, 128, 256, 512), block, make_norm, first, 64, 1 if block is basic else 4, first_stride)
    width = outside if project is None else project
    made = None if project is None else projector(outside, project, norm)
    return Network(stages, average_pool(), nn.Linear(width, classes), width, projector=made)


def _stages(
    counts: Sequence[int],
    planes: Sequence[int],
    block: Block,
    make_norm: Norm,
    stem: nn.Module,
    inside: int,
    expansion: int = 4,
    first_stride: int = 1,
) -> dict[str, nn.Module]:
    stages: dict[str, nn.Module] = {"stem": stem}
    for stage, (count, width) in enumerate(zip(counts, planes, strict=True), 1):
        blocks = []
        for n in range(count):
            stride = 1 if n else (first_stride if stage == 1 else 2)
            blocks.append(block(inside, width, stride, make_norm))
            inside = width * expansion
        stages[f"stage{stage}"] = nn.Sequential(*blocks)
    return stages


def basic(inside: int, planes: int, stride: int, make_norm: Norm) -> Residual:
    """Two 3x3 convolutions."""
    return Residual(_basic_branch(inside, planes, stride, make_norm), _shortcut(inside, planes, stride, make_norm))


def bottleneck(inside: int, planes: int, stride: int, make_norm: Norm) -> Residual:
    """1x1 down, 3x3, 1x1 up to four times as many channels."""
    outside = 4 * planes
    branch = nn.Sequential(
        *(conv(inside, planes, 1), make_norm(planes), nn.ReLU()),
        *(conv(planes, planes, 3, stride), make_norm(planes), nn.ReLU()),
        *(conv(planes, outside, 1), make_norm(outside)),
    )
    return Residual(branch, _shortcut(inside, outside, stride, make_norm))


def _basic_branch(inside: int, planes: int, stride: int, make_norm: Norm) -> nn.Module:
    return nn.Sequential(
        *(conv(inside, planes, 3, stride), make_norm(planes), nn.ReLU()),
        *(conv(planes, planes, 3), make_norm(planes)),
    )


def _shortcut(inside: int, outside: int, stride: int, make_norm: Norm) -> nn.Module | None:
    if stride == 1 and inside == outside:
        return None
    return nn.Sequential(conv(inside, outside, 1, stride), make_norm(outside))


def _stem(inside: int, outside: int, norm: str) -> nn.Module:
    return nn.Sequential(conv(inside, outside, 3), norm_layer(norm)(outside), nn.ReLU())


def _large_stem(inside: int, norm: str, pool: bool) -> nn.Module:
    layers = [conv(inside, 64, 7, 2), norm_layer(norm)(64), nn.ReLU()]
    return nn.Sequential(*layers, *([nn.MaxPool2d(3, 2, padding=1)] if pool else []))


def conv(inside: int, outside: int, size: int, stride: int = 1) -> nn.Conv2d:
    """A convolution without bias that keeps the picture's size, but for its stride."""
    return nn.Conv2d(inside, outside, size, stride, padding=size // 2, bias=False)


def average_pool() -> nn.Module:
    """The mean over all pixels, one number a channel."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())


def _scaled(network: Network) -> Network:
    """Convolutions drawn so that the gradients' size stays the same from layer to layer."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return network
