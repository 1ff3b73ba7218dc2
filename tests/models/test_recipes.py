"""What every network does with its pictures, operation by operation, and how its weights are drawn."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from isofed.models import Network, create, names

# --- values, and the operations that make them of one another


@dataclass(frozen=True, eq=False, repr=False)
class Value:
    """What an operation makes of other values. That of the same values is one object, so ``is`` compares passes."""

    operation: str
    inputs: tuple[Value, ...]
    depth: int

    def operations(self) -> list[str]:
        """All that had to be done for it, once each, in an order that depends on nothing else."""
        seen: dict[Value, None] = {}

        def visit(value: Value) -> None:
            if value not in seen:
                for before in value.inputs:
                    visit(before)
                seen[value] = None

        visit(self)
        return [value.operation for value in seen]


@functools.cache
def _made(operation: str, inputs: tuple[Value, ...]) -> Value:
    return Value(operation, inputs, 1 + max((value.depth for value in inputs), default=0))


def made(operation: str, *inputs: Value) -> Value:
    if operation in ("add", "mul"):  # of which the order does not matter
        inputs = tuple(sorted(inputs, key=lambda value: (value.depth, id(value))))
    return _made(operation, inputs)


PICTURES = made("pictures")


class Recorder(TorchDispatchMode):
    """Writes down what runs, below all the names by which PyTorch can be asked for it."""

    def __init__(self, pictures: Tensor) -> None:
        super().__init__()
        # With the tensors themselves: that of another would get the number of one that is gone.
        self.values: dict[int, tuple[Tensor, Value]] = {id(pictures): (pictures, PICTURES)}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = tree_leaves((args, kwargs))
        inputs = [self.values[id(t)][1] for t in given if id(t) in self.values]
        result = func(*args, **(kwargs or {}))
        first = result[0] if isinstance(result, tuple) else result
        name = func.overloadpacket.__name__.strip("_")  # relu_ is a relu
        if name in ("view", "detach") or (name == "t" and not inputs):  # the same numbers; or a weight
            self.values |= {id(first): (first, value) for value in inputs}
        elif not name.startswith("empty"):
            self.values[id(first)] = first, made(said(name, args, given), *inputs)
        return result

    def __getitem__(self, tensor: Tensor) -> Value:
        return self.values[id(tensor)][1]


def said(name: str, args: tuple[Any, ...], given: Sequence[Any]) -> str:
    """An operation with the numbers it is given, and the sizes of a weight that its input does not have."""
    if name == "convolution":
        _, weight, bias, *numbers = args
        size = (len(weight), *weight.shape[2:])
        return " ".join(map(str, ["conv", *size, *tree_leaves(numbers), *(["bias"] if bias is not None else [])]))
    if name == "addmm":
        return f"dense {len(args[0])}"
    if name == "bernoulli" and len(args) == 1:
        return "bernoulli 0.5"  # the default is left out
    if name == "mean":
        return " ".join(map(str, [name, *sorted(axis % args[0].dim() for axis in args[1])]))
    return " ".join([name, *(str(leaf) for leaf in given if leaf is not None and not isinstance(leaf, Tensor))])


def conv(x: Value, outside: int, size: int, stride: int, pad: int, *, bias: bool = False, groups: int = 1) -> Value:
    numbers = f"{stride} {stride} {pad} {pad} 1 1 False 0 0 {groups}"
    return made(f"conv {outside} {size} {size} {numbers}{' bias' * bias}", x)


def norm(x: Value) -> Value:
    return made("native_batch_norm True 0.1 1e-05", x)


def relu(x: Value) -> Value:
    return made("relu", x)


def largest(x: Value, size: int, stride: int, pad: int = 0) -> Value:
    return made(f"max_pool2d_with_indices {size} {size} {stride} {stride}{f' {pad} {pad}' * bool(pad)}", x)


def mean(x: Value) -> Value:
    return made("mean 2 3", x)


def dense(x: Value, outside: int) -> Value:
    return made(f"dense {outside}", x)


def dropout(x: Value, rate: float) -> Value:
    return made("mul", x, made(f"div {1 - rate}", made(f"bernoulli {1 - rate}")))


# --- blocks; those of ResNets with their planes, the stride, and whether they are the first of a stage


def layer(x: Value, outside: int, size: int = 3, stride: int = 1, pad: int | None = None, bias: bool = False) -> Value:
    return relu(norm(conv(x, outside, size, stride, size // 2 if pad is None else pad, bias=bias)))


def shortcut(x: Value, outside: int, stride: int) -> Value:
    return norm(conv(x, outside, 1, stride, 0))


def basic(x: Value, planes: int, stride: int, first: bool) -> Value:
    branch = norm(conv(layer(x, planes, 3, stride), planes, 3, 1, 1))
    return relu(made("add", shortcut(x, planes, stride) if stride > 1 else x, branch))


def option_a(x: Value, planes: int, stride: int, first: bool) -> Value:
    branch, aside = norm(conv(layer(x, planes, 3, stride), planes, 3, 1, 1)), x
    if stride > 1:
        for axis in (2, 3):
            aside = made(f"slice {axis} 0 {sys.maxsize} {stride}", aside)
        aside = made(f"constant_pad_nd 0 0 0 0 {planes // 4} {planes // 4} 0.0", aside)
    return relu(made("add", aside, branch))


def bottleneck(x: Value, planes: int, stride: int, first: bool) -> Value:
    branch = norm(conv(layer(layer(x, planes, 1), planes, 3, stride), 4 * planes, 1, 1, 0))
    return relu(made("add", shortcut(x, 4 * planes, stride) if first else x, branch))


def excited(x: Value, planes: int, stride: int, first: bool) -> Value:
    before = relu(norm(x))
    branch = conv(layer(before, planes, 3, stride), planes, 3, 1, 1)
    scale = conv(relu(conv(mean(branch), planes // 16, 1, 1, 0, bias=True)), planes, 1, 1, 0, bias=True)
    branch = made("mul", branch, made("sigmoid", scale))
    return made("add", conv(before, planes, 1, stride, 0) if stride > 1 else x, branch)


def inverted(x: Value, inside: int, outside: int, expansion: int, stride: int) -> Value:
    planes = expansion * inside
    each = relu(norm(conv(layer(x, planes, 1), planes, 3, stride, 1, groups=planes)))
    branch = norm(conv(each, outside, 1, 1, 0))
    if stride > 1:
        return branch
    return made("add", x if inside == outside else shortcut(x, outside, 1), branch)


Block = Callable[[Value, int, int, bool], Value]
CIFAR, IMAGENET = (16, 32, 64), (64, 128, 256, 512)
TWO_EACH, FIFTY = (2, 2, 2, 2), (3, 4, 6, 3)


def stages(x: Value, block: Block, counts: Sequence[int], planes: Sequence[int], first_stride: int = 1) -> Value:
    for stage, (count, width) in enumerate(zip(counts, planes, strict=True)):
        for n in range(count):
            x = block(x, width, 1 if n else 2 if stage else first_stride, n == 0)
    return mean(x)


def feduv_projector(x: Value, width: int) -> Value:
    return relu(norm(dense(relu(norm(dense(x, width))), width)))


def moon_head(x: Value, inside: int) -> Value:
    return dense(relu(dense(x, inside)), 256)


# --- networks: from pictures to features


def cnn(x: Value) -> Value:
    return mean(layer(layer(layer(x, 16), 32, stride=2), 64, stride=2))


def mlp(x: Value) -> Value:
    return relu(dense(relu(dense(x, 64)), 64))


def feduv_cnn(x: Value) -> Value:
    sizes = [(16, 3, 1), (16, 1, 1), (32, 3, 2), (32, 3, 1), (32, 1, 1), (64, 3, 2), (64, 3, 1), (64, 1, 1)]
    for outside, size, stride in sizes:
        x = layer(x, outside, size, stride, pad=0)
    return feduv_projector(mean(x), 256)


def pairs(x: Value, widths: Sequence[int], bias: bool) -> Value:
    for width in widths:
        x = largest(layer(layer(x, width, bias=bias), width, bias=bias), 2, 2)
    return mean(x)


def mobilenetv2(x: Value) -> Value:
    rows = [(1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)]
    x, inside = layer(x, 32), 32
    for expansion, outside, blocks, stride in rows:
        for n in range(blocks):
            x, inside = inverted(x, inside, outside, expansion, 1 if n else stride), outside
    return mean(layer(x, 1280, 1))


def alexnet_bn(x: Value) -> Value:
    x = largest(layer(x, 64, 11, 4, pad=2, bias=True), 3, 2)
    x = largest(layer(x, 192, 5, bias=True), 3, 2)
    x = largest(layer(layer(layer(x, 384, bias=True), 256, bias=True), 256, bias=True), 3, 2)
    return feduv_projector(made("adaptive_avg_pool2d 6 6", x), 4096)  # its dense layers are made up as those are


def moon_cnn(x: Value) -> Value:
    for width in (6, 16):
        x = largest(relu(conv(x, width, 5, 1, 0, bias=True)), 2, 2)
    x = made("adaptive_avg_pool2d 5 5", x)  # which MOON does not have: at 32 pixels it changes nothing
    return moon_head(relu(dense(relu(dense(x, 120)), 84)), 84)


def pfl_cnn(x: Value) -> Value:
    for width in (32, 64):
        x = relu(conv(x, width, 3, 1, 0, bias=True))
    return dropout(relu(dense(dropout(largest(x, 2, 2), 0.25), 128)), 0.5)


RECIPES: dict[str, Callable[[Value], Value]] = {
    "cnn": cnn,
    "mlp": mlp,
    "feduv-cnn": feduv_cnn,
    "feduv-resnet18": lambda x: feduv_projector(stages(layer(x, 64), basic, TWO_EACH, IMAGENET, 2), 512),
    "feduv-resnet18-plain": lambda x: feduv_projector(stages(layer(x, 64), basic, TWO_EACH, IMAGENET), 512),
    "feduv-resnet50": lambda x: feduv_projector(stages(layer(x, 64, 7, 2), bottleneck, FIFTY, IMAGENET), 2048),
    "resnet8": lambda x: stages(layer(x, 16), option_a, (1, 1, 1), CIFAR),
    "resnet20": lambda x: stages(layer(x, 16), option_a, (3, 3, 3), CIFAR),
    "resnet32": lambda x: stages(layer(x, 16), option_a, (5, 5, 5), CIFAR),
    "resnet56": lambda x: stages(layer(x, 16), bottleneck, (6, 6, 6), CIFAR),
    "resnet56-basic": lambda x: stages(layer(x, 16), option_a, (9, 9, 9), CIFAR),
    "resnet18": lambda x: stages(layer(x, 64), basic, TWO_EACH, IMAGENET),
    "resnet18-imagenet": lambda x: stages(largest(layer(x, 64, 7, 2), 3, 2, 1), basic, TWO_EACH, IMAGENET),
    "resnet50-imagenet": lambda x: stages(largest(layer(x, 64, 7, 2), 3, 2, 1), bottleneck, FIFTY, IMAGENET),
    "mobilenetv2": mobilenetv2,
    "vgg13": lambda x: pairs(x, (64, 128, 256, 512, 512), bias=True),
    "senet18": lambda x: stages(layer(x, 64), excited, TWO_EACH, IMAGENET),
    "convnet7": lambda x: pairs(x, (32, 64, 128), bias=False),
    "alexnet-bn": alexnet_bn,
    "moon-cnn": moon_cnn,
    "moon-resnet50": lambda x: moon_head(stages(layer(x, 64), bottleneck, FIFTY, IMAGENET), 2048),
    "pfl-cnn": pfl_cnn,
}


def built(name: str) -> tuple[Network, Tensor]:
    """A network and two pictures, on whatever device is the default."""
    side = 256 if name == "alexnet-bn" else 32
    return create(name, classes=10, shape=(3, side, side)), torch.empty(2, 3, side, side)


def test_all_networks_are_written_down_here() -> None:
    assert set(RECIPES) == set(names())


@pytest.mark.parametrize("name", RECIPES)
def test_a_pass_does_what_is_written_down_and_nothing_else(name: str) -> None:
    with torch.device("meta"):  # where operations are called as anywhere, and compute nothing
        network, pictures = built(name)
    with torch.no_grad(), Recorder(pictures) as recorder:
        output = network(pictures)
    features = RECIPES[name](PICTURES)
    for found, wanted in ((recorder[output.features], features), (recorder[output.logits], dense(features, 10))):
        assert found.operations() == wanted.operations()
        assert found is wanted  # and each operation is given the results of the right ones


# --- initial weights

FAN_IN = ("resnet8", "resnet20", "resnet32", "resnet56-basic")  # Kaiming's rule, the head too
FAN_OUT = ("resnet56", "resnet18-imagenet", "resnet50-imagenet", "moon-resnet50")  # Kaiming's, convolutions alone


def is_spread(tensor: Tensor, deviation: float, kurtosis: float) -> None:
    """How far from zero the numbers are, to within five standard deviations of that from one draw to another."""
    count = tensor.numel()
    found = float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) / math.sqrt(count)
    assert found == pytest.approx(deviation, rel=5 * math.sqrt((kurtosis - 1) / 4 / count))


def is_uniform(tensor: Tensor, bound: float) -> None:
    assert float(tensor.abs().max()) <= bound * (1 + 1e-6)
    is_spread(tensor, bound / math.sqrt(3), 1.8)


def is_normal(tensor: Tensor, deviation: float) -> None:
    is_spread(tensor, deviation, 3)
    # An even one of the same spread ends at 1.7 deviations; one number in 22 lies beyond 2.
    assert float(tensor.abs().max()) > 2 * deviation


@pytest.mark.parametrize("name", RECIPES)
def test_weights_are_drawn_by_the_networks_rule(name: str) -> None:
    for part in built(name)[0].modules():
        own = {k: t.detach() for k, t in [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]}
        if isinstance(part, _BatchNorm):
            start = {"weight": 1, "bias": 0, "running_mean": 0, "running_var": 1}
            assert {k: t.unique().tolist() for k, t in own.items()} == {k: [v] for k, v in start.items()}
        elif own:
            assert isinstance(part, (nn.Conv2d, nn.Linear))
            weight = own["weight"]
            fan_in, fan_out = weight[0].numel(), weight[:, 0].numel()
            if name in FAN_IN:
                is_normal(weight, math.sqrt(2 / fan_in))
            elif name in FAN_OUT and isinstance(part, nn.Conv2d):
                is_normal(weight, math.sqrt(2 / fan_out))
            else:
                is_uniform(weight, 1 / math.sqrt(fan_in))  # PyTorch's own
            if "bias" in own:
                is_uniform(own["bias"], 1 / math.sqrt(fan_in))
