"""Convolutions and stored batch norm whose second derivatives are quick.

PyTorch differentiates the gradient of a convolution's weight as one more convolution, whose filter is as large as the
whole picture. These are the same numbers as the gradient of a weight: of ResNet-56 on 640 pictures, a product with the
Hessian takes an H200 0.31 s this way and 1.50 s that way.

Batch norm by stored statistics multiplies each channel with a number and adds another. Behind a convolution that is a
convolution with other weights: what was some twenty operations on whole feature maps, for second derivatives, becomes a
few on the weights. (Forward, the rounding is another one: in float32 a ReLU at its kink may fall to the other side.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import batch_norm, conv1d, conv2d, conv3d
from torch.overrides import TorchFunctionMode

from isofed.models import pointwise

_Way = tuple[list[int], list[int], list[int], int]  # stride, padding, dilation and groups
_SPACE = {conv1d: 1, conv2d: 2, conv3d: 3}  # dimensions
_MADE_BY = "isofed_made_by"  # an attribute of what a convolution gives


class _Made(NamedTuple):
    """How a feature map was made, and the versions then: whoever changes a tensor in place makes another one."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    way: _Way
    versions: tuple[int, int]  # of the feature map, and of x


class TwiceDifferentiable(TorchFunctionMode):
    """In this block, such layers of any network give what they always do, to rounding, and second derivatives soon.

    One thing is lost: a network that itself takes a gradient with respect to what a convolution gave finds none that
    comes by way of a batch norm behind it.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs, made = kwargs or {}, None
        if func in _SPACE:
            made = _convolution(_SPACE[func], *args, **kwargs)
        elif func is batch_norm:
            made = _norm(*args, **kwargs)
        return func(*args, **kwargs) if made is None else made


def _convolution(
    space: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor | None:
    """None, for PyTorch to do it, where there is no batch or the padding is a word, or only PyTorch can do it."""
    padding = 0 if padding == "valid" else padding
    if isinstance(padding, str) or input.dim() != space + 2 or not _is_plain(input):
        return None
    brackets = (n if isinstance(n, (list, tuple)) else [n] for n in (stride, padding, dilation))
    each = [[int(m) for m in n] for n in brackets]  # which may be NumPy's
    # PyTorch takes one number for all dimensions, in brackets, too.
    one, two, three = (n * space if len(n) == 1 else n for n in each)
    if (pixels := pointwise.seen(input, weight, one, two)) is not None:
        input, one = pixels, [1] * space
    way = (one, two, three, groups)
    made: Tensor = _Convolution.apply(input, weight, way)
    made = made if bias is None else made + _each_channel(bias, made)
    if torch.is_grad_enabled():  # otherwise a batch norm may train what this convolution is not to train
        setattr(made, _MADE_BY, _Made(input, weight, bias, way, (made._version, input._version)))
    return made


def _is_plain(x: Tensor) -> bool:
    """Whether nothing has to be done with a call that PyTorch knows how to do with its own convolutions only.

    They are rounded by autocast, rewritten by ``torch.func`` and, with their second derivatives, by a compiler; and of
    complex numbers they are made of several real ones.
    """
    rewritten = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    return not (rewritten or x.is_complex() or torch.is_autocast_enabled(x.device.type))


def _norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor | None:
    """None where the batch's own statistics are wanted, or another precision."""
    if training or running_mean is None or running_var is None or input.dtype != running_var.dtype:
        return None
    scale = (running_var + eps).rsqrt()
    scale = scale if weight is None else scale * weight
    shift = -running_mean * scale if bias is None else bias - running_mean * scale
    made: _Made | None = getattr(input, _MADE_BY, None)
    # Somebody's hook is to see the gradient of what the convolution has given.
    if made is None or input._backward_hooks or made.versions != (input._version, made.x._version):
        return input * _each_channel(scale, input) + _each_channel(shift, input)
    shift = shift if made.bias is None else shift + made.bias * scale
    folded: Tensor = _Convolution.apply(made.x, made.weight * scale.view(-1, *[1] * (made.weight.dim() - 1)), made.way)
    return folded + _each_channel(shift, folded)


def _each_channel(values: Tensor, x: Tensor) -> Tensor:
    """One number for each channel, to be joined with a batch."""
    return values.view(-1, *[1] * (x.dim() - 2))


def _convolved(x: Tensor, weight: Tensor, way: _Way) -> Tensor:
    stride, padding, dilation, groups = way
    return torch.convolution(x, weight, None, stride, padding, dilation, False, [0] * len(stride), groups)


def _back(grad: Tensor, x: Tensor, weight: Tensor, way: _Way, to_x: bool, to_weight: bool) -> Sequence[Tensor | None]:
    stride, padding, dilation, groups = way
    found = torch.ops.aten.convolution_backward(
        grad,
        x,
        weight,
        None,
        stride,
        padding,
        dilation,
        False,
        [0] * len(stride),
        groups,
        [to_x, to_weight, False],
    )
    return found[0], found[1]


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, way: _Way) -> Tensor:
        ctx.save_for_backward(x, weight)  # themselves, not copies: a second derivative looks for where they came from
        ctx.way = way
        return _convolved(x, weight, way)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return *_Gradients.apply(grad, *ctx.saved_tensors, ctx.way, *ctx.needs_input_grad[:2]), None


class _Gradients(torch.autograd.Function):
    """A(grad, weight), that of the pictures, and B(grad, x), that of the weight.

    Both are linear in each argument, with a . A(grad, w) = grad . conv(a, w) and b . B(grad, x) = grad . conv(x, b);
    so what flows back from a and b is made of the same three functions. It can be differentiated as well, for networks
    and losses that have a gradient in them: PyTorch would leave out, without a word, what can be only once.
    """

    @staticmethod
    def forward(ctx: Any, grad: Tensor, x: Tensor, weight: Tensor, way: _Way, to_x: bool, to_weight: bool) -> Any:
        ctx.save_for_backward(grad, x, weight)
        ctx.way = way
        ctx.set_materialize_grads(False)
        return tuple(_back(grad, x, weight, way, to_x, to_weight))

    @staticmethod
    def backward(ctx: Any, a: Tensor | None, b: Tensor | None) -> Any:
        (grad, x, weight), way = ctx.saved_tensors, ctx.way
        to_grad = to_x = to_weight = None
        if a is not None:
            to_grad = _Convolution.apply(a, weight, way)
            if ctx.needs_input_grad[2]:
                to_weight = _Gradients.apply(grad, a, weight, way, False, True)[1]
        if b is not None:
            along = _Convolution.apply(x, b, way)
            to_grad = along if to_grad is None else to_grad + along
            if ctx.needs_input_grad[1]:
                to_x = _Gradients.apply(grad, x, b, way, True, False)[0]
        return to_grad, to_x, to_weight, None, None, None
