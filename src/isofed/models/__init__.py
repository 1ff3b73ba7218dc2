"""The networks, by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from isofed.draws import generator, torch_seeded
from isofed.errors import IsofedError, UserError, unknown
from isofed.models import convnets, mobilenet, resnet, senet
from isofed.models.adapter import adapt, check_outputs
from isofed.models.base import Network, Output, has_batch_norm
from isofed.models.small import cnn, mlp
from isofed.plugins import check_file, is_file_reference, load_from_file, shorten
from isofed.traces import place_of
from isofed.words import kind_of

__all__ = ["Network", "Output", "adapt", "create", "describe", "has_batch_norm", "load", "names"]

_NETWORKS: dict[str, Callable[..., Network]] = {
    "cnn": cnn,
    "mlp": mlp,
    "feduv-cnn": convnets.feduv_cnn,
    "feduv-resnet18": resnet.feduv_resnet18,
    "feduv-resnet18-plain": resnet.feduv_resnet18_plain,
    "feduv-resnet50": resnet.feduv_resnet50,
    "resnet8": resnet.resnet8,
    "resnet20": resnet.resnet20,
    "resnet32": resnet.resnet32,
    "resnet56": resnet.resnet56,
    "resnet56-basic": resnet.resnet56_basic,
    "resnet18": resnet.resnet18,
    "resnet18-imagenet": resnet.resnet18_imagenet,
    "resnet50-imagenet": resnet.resnet50_imagenet,
    "mobilenetv2": mobilenet.mobilenetv2,
    "vgg13": convnets.vgg13,
    "senet18": senet.senet18,
    "convnet7": convnets.convnet7,
    "alexnet-bn": convnets.alexnet_bn,
    "moon-cnn": convnets.moon_cnn,
    "moon-resnet50": resnet.moon_resnet50,
    "pfl-cnn": convnets.pfl_cnn,
}


def names() -> tuple[str, ...]:
    """The networks that :func:`create` knows."""
    return tuple(_NETWORKS)


def describe() -> dict[str, str]:
    """The name of every network with one line about it."""
    return {name: (build.__doc__ or "").strip().splitlines()[0] for name, build in _NETWORKS.items()}


def load(path: str | Path, client: int | None = None) -> Network:
    """The network that a run ended with, from its ``model.safetensors`` or its folder; or one that it has kept.

    Where clients keep tensors for themselves, as with FedBN, there is one for each of them: ``client`` says whose.
    Its ``data_mean`` and ``data_std`` say how its inputs were normalised, channel by channel.
    """
    # Files and methods are no business of a network otherwise; but a method may have rebuilt it.
    from isofed.files import load_tensors
    from isofed.methods import parse

    file = Path(path) / "model.safetensors" if Path(path).is_dir() else Path(path)
    tensors, info = load_tensors(file)
    if not {"classes", "model", "shape", "norm", "method"} <= set(info):
        raise UserError(f"{file} does not say which network its weights are of; give a run's folder or a model it kept")
    classes = len(info["classes"])
    network = create(info["model"], classes=classes, shape=tuple(info["shape"]), norm=info["norm"])
    known = [part for part in info["method"] if _is_known(part)]
    if known:
        with torch_seeded(0, "build"):
            parse(known).build(network, classes, generator(0, "build"))
    try:
        _fill(network, _of_client(file, tensors, client))
    except RuntimeError:
        unknown_parts = [str(part) for part in info["method"] if part not in known]
        why = f", perhaps because of '{unknown_parts[0]}', which is not known here" if unknown_parts else ""
        raise UserError(f"the weights in {file} do not fit the network '{info['model']}'{why}") from None
    if "mean" in info and "std" in info:
        network.data_mean, network.data_std = tuple(info["mean"]), tuple(info["std"])
    return network


def _of_client(file: Path, tensors: dict[str, Tensor], client: int | None) -> dict[str, Tensor]:
    """The shared tensors, with the client's own in their places."""
    shared = {name: tensor for name, tensor in tensors.items() if not name.startswith("client/")}
    theirs = sorted({int(name.split("/")[1]) for name in tensors if name.startswith("client/")})
    if client is None and theirs:
        raise UserError(
            f"clients keep a part of the network in {file} for themselves, so there is one for each of them: "
            f"load(..., client={theirs[0]}) gives that of client {theirs[0]}"
        )
    if client is not None and client not in theirs:
        has = f"clients {theirs[0]} to {theirs[-1]} have one there" if theirs else "none has: leave client out"
        raise UserError(f"client {client} has no part of its own of the network in {file}; {has}")
    mine = f"client/{client}/"
    return shared | {name.removeprefix(mine): t for name, t in tensors.items() if name.startswith(mine)}


def _fill(network: Network, tensors: dict[str, Tensor]) -> None:
    """Give a network the tensors of a file, which also holds the buffers that a state dict leaves out."""
    listed = network.state_dict()
    for name, buffer in network.named_buffers():
        if name not in listed and name in tensors and tensors[name].shape == buffer.shape:
            buffer.copy_(tensors.pop(name))
    network.load_state_dict(_by_all_names(tensors, network))


def _by_all_names(tensors: dict[str, Tensor], network: Network) -> dict[str, Tensor]:
    """A tensor that a network has in several places is kept by its first name, and loaded by all."""
    first: dict[int, str] = {}
    for name, tensor in network.state_dict(keep_vars=True).items():
        known = first.setdefault(id(tensor), name)
        if known in tensors:
            tensors = tensors | {name: tensors[known]}
    return tensors


def _is_known(part: Any) -> bool:
    """Whether a part of a method, as it is recorded, can be made again: not so if its class was made in a session."""
    from isofed.methods import parse

    try:
        parse([part])
    except IsofedError:
        return False
    return True


def create(
    name: str,
    *,
    classes: int,
    shape: tuple[int, int, int] = (3, 32, 32),
    norm: str | None = None,
    seed: int = 0,
) -> Network:
    """Build a network with initial weights that depend on ``seed`` alone.

    ``name`` is one of :func:`names`, or ``path/to/file.py:build`` for a function of your own that takes ``shape``,
    ``classes`` and (where a ``norm`` is asked for) ``norm``, and returns a :class:`Network`. Without a ``norm``, or
    with ``own``, it has its own.
    """
    said, own = shorten(name), is_file_reference(name)
    if own:
        build = load_from_file(name, "model", _could_build)
    elif name in _NETWORKS:
        build = _NETWORKS[name]
    else:
        check_file(name.partition(":")[0], "model")
        raise unknown("model", name, _NETWORKS)
    if not callable(build):
        raise UserError(f"model '{said}' is {kind_of(build)}; it must be a function of shape and classes")
    norm = None if norm == "own" else norm
    options = {} if norm is None else {"norm": norm}
    if norm is not None and "norm" not in inspect.signature(build).parameters:
        raise UserError(f"model '{said}' does not let its normalisation be chosen; leave norm={norm} out")
    try:
        with torch_seeded(seed, "network"):
            network = build(shape, classes, **options)
    except IsofedError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {error}{place_of(error)}"
        raise UserError(f"model '{said}' could not be built: {why}") from error
    if not isinstance(network, Network):
        raise UserError(f"model '{said}' gave {kind_of(network)}; {_how_to_wrap(network)}")
    if own:
        check_outputs(f"model '{said}'", network, shape, classes)
    network.shape = shape
    return network


def _could_build(thing: Any) -> bool:
    """Whether something in a user's file can be asked for a network."""
    if not callable(thing) or (isinstance(thing, type) and not issubclass(thing, Network)):
        return False
    try:
        inspect.signature(thing).bind((3, 32, 32), 10)
    except (TypeError, ValueError):
        return False
    return True


def _how_to_wrap(given: Any) -> str:
    if not isinstance(given, nn.Module):
        return "it must return an isofed.models.Network"
    linear = [name for name, layer in given.named_modules() if name and isinstance(layer, nn.Linear)]
    last = linear[-1] if linear else "NAME-OF-LAST-LAYER"
    return f"wrap it: return adapt(net, '{last}'), with adapt from isofed.models"
