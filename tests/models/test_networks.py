"""The networks of the papers: their sizes as published, at every picture size, and at a fraction of their width."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from isofed.data.base import Dataset, Part
from isofed.diagnostics.cost import pass_macs
from isofed.errors import UserError
from isofed.federation import Federation
from isofed.methods import parse
from isofed.models import Network, adapt, create, has_batch_norm, names
from isofed.models.dropout import Dropout, hashed, places
from isofed.models.residual import residual_blocks
from isofed.models.senet import Excite
from isofed.models.slim import slim_forward
from isofed.models.tiles import in_rows
from tests.cli_tools import succeeds

# Network, classes, picture side, trainable parameters, multiply-accumulates in millions (where stated).
PUBLISHED: list[tuple[str, int, int, int, float | None]] = [
    ("feduv-cnn", 10, 96, 161_594, 58.65),
    ("feduv-cnn", 7, 96, 160_823, None),
    ("feduv-cnn", 10, 32, 161_594, 3.91),
    ("feduv-resnet18", 100, 32, 11_751_716, 141.8),
    ("feduv-resnet18", 7, 96, 11_704_007, 1271.6),
    ("feduv-resnet18-plain", 100, 32, 11_220_132 + 2 * (512 * 512 + 3 * 512), 555.99),  # resnet18 and the projector
    ("feduv-resnet50", 200, 64, 32_318_728, 1314.5),
    ("feduv-resnet50", 65, 96, 32_042_113, 2946.3),
    ("moon-resnet50", 100, 32, 28_246_948, 1302.6),
    ("resnet56", 100, 32, 614_452, 87.24),
    ("resnet56", 10, 32, 591_322, None),
    ("resnet56+moon", 100, 32, 746_036, 87.37),
    ("resnet18-imagenet", 200, 224, 11_279_112, 1813.7),
    ("resnet18-imagenet+moon", 200, 64, 11_621_896, None),
    ("resnet18", 10, 32, 11_173_962, 555.4),
    ("resnet18", 100, 32, 11_220_132, None),
    ("resnet20", 10, 32, 269_722, 40.55),
    ("resnet20", 100, 32, 275_572, None),
    ("resnet32", 10, 32, 464_154, 68.86),
    ("resnet32", 100, 32, 470_004, None),
    ("resnet56-basic", 10, 32, 853_018, 125.5),
    ("mobilenetv2", 10, 32, 2_296_922, 91.15),
    ("mobilenetv2", 100, 32, 2_412_212, None),
    ("mobilenetv2", 200, 64, 2_540_312, 364.8),
    ("mobilenetv2+moon:hidden=640", 10, 32, 3_270_618, 92.13),
    ("mobilenetv2+moon:hidden=640", 100, 32, 3_293_748, None),
    ("vgg13", 10, 32, 9_416_010, 228.3),
    ("vgg13", 100, 32, 9_462_180, None),
    ("senet18", 10, 32, 11_260_354, 555.5),
    ("senet18", 100, 32, 11_306_524, None),
    ("senet18", 200, 64, 11_357_824, None),
    ("alexnet-bn", 10, 256, 57_063_498, 923.1),
    ("pfl-cnn", 10, 32, 1_626_442, None),
]
PAPERS = [n for n in names() if n not in ("cnn", "mlp")]


@pytest.mark.parametrize(("name", "classes", "side", "parameters", "macs"), PUBLISHED)
def test_sizes_are_the_published_ones(name: str, classes: int, side: int, parameters: int, macs: float | None) -> None:
    model, _, method = name.partition("+")
    network = create(model, classes=classes, shape=(3, side, side))
    if method:
        parse(method).build(network, classes, np.random.default_rng(0))
    assert sum(p.numel() for p in network.parameters()) == parameters
    if macs is not None:
        assert pass_macs(network) / 1e6 == pytest.approx(macs, rel=2e-3)


def test_resnet56_has_58_batch_norms() -> None:
    layers = [m for m in create("resnet56", classes=100).modules() if isinstance(m, nn.BatchNorm2d)]
    assert (len(layers), sum(p.numel() for m in layers for p in m.parameters())) == (58, 8_992)


@functools.cache
def _made(name: str, side: int, norm: str | None) -> Network:
    return create(name, classes=4, shape=(3, side, side), norm=norm)


def built(name: str, side: int, norm: str | None = None) -> Network:
    """A network in eval mode, made once, whatever the test before has done with it."""
    return _made(name, side, norm).eval()


def sides(name: str) -> tuple[int, ...]:
    return {"pfl-cnn": (32,), "alexnet-bn": (64, 96)}.get(name, (32, 64, 96))


@pytest.mark.parametrize("name", PAPERS)
def test_every_size_of_picture_gives_features_and_logits(name: str) -> None:
    for side in sides(name):
        network = built(name, side)
        with torch.no_grad():
            output = network(torch.rand(1, 3, side, side))
        assert output.logits.shape == (1, 4) and output.features.shape == (1, network.width)
        assert isinstance(network.head, nn.Linear) and network.head.in_features == network.width
        assert list(output.stages) == list(network.stages) and len(output.stages) >= 2
        assert output.logits.isfinite().all()


@pytest.mark.parametrize("name", [n for n in PAPERS if n not in ("moon-cnn", "pfl-cnn")])
def test_group_norm_instead_of_batch_norm(name: str) -> None:
    network = built(name, sides(name)[0], "group:2")
    assert has_batch_norm(built(name, sides(name)[0])) and not has_batch_norm(network)
    # Group norm does not look at other samples: a sample's features are the same alone and in a batch.
    pictures = torch.rand(2, 3, sides(name)[0], sides(name)[0])
    with torch.no_grad():
        both, one = network.train()(pictures).features, network(pictures[:1]).features
    torch.testing.assert_close(both[:1], one, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["moon-cnn", "pfl-cnn"])
def test_networks_without_normalisation_have_none_to_choose(name: str) -> None:
    with pytest.raises(UserError, match=f"model '{name}' does not let its normalisation be chosen"):
        create(name, classes=4, norm="group:2")


@pytest.mark.parametrize("name", PAPERS)
def test_every_network_runs_at_a_fraction_of_its_width(name: str) -> None:
    side = sides(name)[0]
    network = built(name, side).train()
    with torch.no_grad():
        for width in (0.25, 0.8):
            output = slim_forward(network, torch.rand(2, 3, side, side), width)
            assert output.logits.shape == (2, 4) and output.features.shape[1] < network.width


@pytest.mark.parametrize(("name", "side"), [("feduv-cnn", 21), ("convnet7", 8), ("vgg13", 32), ("moon-cnn", 16)])
def test_the_smallest_pictures_of_a_network(name: str, side: int) -> None:
    with torch.no_grad():
        assert create(name, classes=3, shape=(3, side, side)).eval()(torch.zeros(2, 3, side, side)).logits.shape == (
            2,
            3,
        )
    smaller = f"{name} needs pictures of at least {side}x{side} pixels, not {side}x{side - 1}"
    with pytest.raises(UserError, match=smaller):
        create(name, classes=3, shape=(3, side, side - 1))


@pytest.mark.parametrize("side", [1, 2, 8, 28])
def test_every_network_either_runs_or_says_why_not(side: int) -> None:
    for name in PAPERS:
        try:
            network = create(name, classes=3, shape=(3, side, side)).eval()
        except UserError:
            continue
        with torch.no_grad():
            assert network(torch.zeros(2, 3, side, side)).logits.shape == (2, 3)


def test_what_is_too_small_is_refused() -> None:
    with pytest.raises(UserError, match="alexnet-bn needs pictures of at least 64x64 pixels, not 32x32"):
        create("alexnet-bn", classes=3, shape=(3, 32, 32))
    with pytest.raises(UserError, match="pfl-cnn takes pictures of 32x32 pixels, not 96x96"):
        create("pfl-cnn", classes=3, shape=(3, 96, 96))


def test_feduv_halves_its_pictures_in_the_first_stage_too() -> None:
    stages = built("feduv-resnet18", 32)(torch.zeros(1, 3, 32, 32)).stages
    assert [s.shape[-1] for s in stages.values()] == [32, 16, 8, 4, 2]
    assert [s.shape[-1] for s in built("feduv-cnn", 96)(torch.zeros(1, 3, 96, 96)).stages.values()] == [94, 44, 19]


def test_a_pre_activation_block_by_hand() -> None:
    block = residual_blocks(create("senet18", classes=3))[2]  # the first with a shortcut
    x = torch.randn(4, 64, 8, 8, dtype=torch.float64)
    block.double().eval()
    assert isinstance(block.before, nn.Sequential) and isinstance(block.branch, nn.Sequential) and block.shortcut
    y = torch.relu(block.before[0](x))
    inside = block.branch[3](torch.relu(block.branch[1](block.branch[0](y))))
    excite = block.branch[4]
    assert isinstance(excite, Excite)
    scale = torch.sigmoid(excite.up(torch.relu(excite.down(inside.mean((2, 3), keepdim=True)))))
    torch.testing.assert_close(block(x), inside * scale + block.shortcut(y))


def test_a_linear_bottleneck_has_no_last_relu() -> None:
    blocks = residual_blocks(create("mobilenetv2", classes=3))
    assert len(blocks) == 1 + 2 + 2 + 3 + 3 + 2 + 1  # those that keep the picture's size
    assert (blocks[1].eval()(torch.randn(2, 16, 4, 4)) < 0).any()


# --- dropout from the plan


def test_dropped_entries_depend_on_the_key_alone() -> None:
    layer, x = Dropout(0.25), torch.rand(64, 500) + 1
    layer.key = torch.tensor(7)
    first = layer(x)
    assert torch.equal(layer(x), first)
    layer.key = torch.tensor(8)
    assert not torch.equal(layer(x), first)
    torch.testing.assert_close(first[first != 0], (x / 0.75)[first != 0])
    assert layer.eval()(x) is x


def test_dropout_is_even_and_unrelated_from_key_to_key() -> None:
    keys = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 200)
    drawn = torch.stack([hashed(torch.tensor(k), places(torch.empty(1000))) * 2**-24 for k in keys]).double()
    assert float(drawn.min()) >= 0 and float(drawn.max()) < 1
    # 200,000 uniform numbers: mean 1/2 within 4 of its standard deviations, each tenth equally full likewise.
    assert float(drawn.mean()) == pytest.approx(0.5, abs=4 * (1 / 12 / drawn.numel()) ** 0.5)
    counts = np.histogram(drawn.numpy(), 10, (0, 1))[0]
    assert abs(counts - 20_000).max() < 4 * (200_000 * 0.1 * 0.9) ** 0.5
    within = np.corrcoef(drawn.numpy()[:, :-1].ravel(), drawn.numpy()[:, 1:].ravel())[0, 1]
    between = np.corrcoef(drawn.numpy()[:-1].ravel(), drawn.numpy()[1:].ravel())[0, 1]
    assert max(abs(within), abs(between)) < 4 / 200_000**0.5


@pytest.mark.parametrize("key", [0, -7, 2**62 + 12345, -(2**63)])
def test_the_draws_are_the_highest_bits_of_murmurs_finaliser(key: int) -> None:
    bits = (np.arange(1, 1001, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)) + np.uint64(key % 2**64)
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        bits = (bits ^ (bits >> np.uint64(33))) * np.uint64(factor)
    bits ^= bits >> np.uint64(33)
    wanted = (bits >> np.uint64(40)).astype(np.int64)
    assert np.array_equal(hashed(torch.tensor(key), places(torch.empty(1000))).numpy(), wanted)


def test_neighbouring_keys_drop_unrelated_entries() -> None:
    a, b = ((hashed(torch.tensor(k), places(torch.empty(100_000))) * 2**-24).numpy() for k in (5, 6))
    assert abs(np.corrcoef(a, b)[0, 1]) < 4 / 100_000**0.5


def pictures(count: int = 40) -> Dataset:
    rng = np.random.default_rng(0)
    images = torch.from_numpy(rng.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8))
    part = Part(images, torch.arange(count) % 4)
    return Dataset.build("noise", list("abcd"), part, part)


def test_a_federation_with_dropout_repeats_and_does_not_touch_torchs_generator() -> None:
    settings: dict[str, Any] = {"model": "pfl-cnn", "clients": 2, "partition": "iid", "rounds": 1, "batch_size": 10}
    settings |= {"local_epochs": 1, "executor": "serial", "dataset": pictures()}
    one, two = (Federation(**settings).fit() for _ in range(2))
    other = Federation(**settings, seed=1).fit()
    assert all(torch.equal(one.weights[k], two.weights[k]) for k in one.weights)
    assert not torch.equal(one.weights["head.weight"], other.weights["head.weight"])


# --- networks of one's own


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.classifier = nn.Sequential(nn.Dropout(0.1), nn.Linear(6, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.body(x))


def test_a_module_with_the_name_of_its_last_layer() -> None:
    own, x = Own().eval(), torch.rand(2, 3, 8, 8)
    wanted, features = own(x), own.body(x)
    network = adapt(own, "classifier.1").eval()
    output = network(x)
    assert network.width == 6
    torch.testing.assert_close(output.logits, wanted)
    torch.testing.assert_close(output.features, features)


def test_an_encoder_and_a_head() -> None:
    encoder = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Conv2d(6, 5, 3))
    network = adapt(encoder, nn.Linear(5, 4))
    output = network(torch.rand(2, 3, 8, 8))
    assert list(output.stages) == ["0", "1"] and output.features.shape == (2, 5)
    with pytest.raises(UserError, match="say how wide its input is"):
        adapt(encoder, nn.Sequential(nn.Linear(5, 4)))
    assert adapt(encoder, nn.Sequential(nn.Linear(5, 4)), width=5).width == 5
    with pytest.raises(UserError, match=r"no layer 'fc'; its last one is 'classifier.1'"):
        adapt(Own(), "fc")


class Doubled(nn.Sequential):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def hooked(encoder: nn.Sequential) -> nn.Sequential:
    encoder.register_forward_hook(lambda module, given, made: made + 1)
    return encoder


def set_apart(encoder: nn.Sequential) -> nn.Sequential:
    own = encoder.forward
    encoder.forward = lambda input: own(input) - 1  # type: ignore[method-assign]
    return encoder


ONE, AGAIN = nn.ReLU(), nn.Linear(5, 5)


@pytest.mark.parametrize(
    ("encoder", "stages"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(12, 5), ONE, AGAIN, ONE, AGAIN), 6),
        (Doubled(nn.Flatten(), nn.Linear(12, 5)), 1),
        (hooked(nn.Sequential(nn.Flatten(), nn.Linear(12, 5))), 1),
        (set_apart(nn.Sequential(nn.Flatten(), nn.Linear(12, 5))), 1),
    ],
    ids=["a layer in two places", "one that does more", "hooked", "another forward"],
)
def test_an_encoder_gives_what_it_gave_before(encoder: nn.Sequential, stages: int) -> None:
    head, x = nn.Linear(5, 3), torch.randn(4, 3, 2, 2)
    wanted = head(encoder(x))
    network = adapt(encoder, head)
    torch.testing.assert_close(network(x).logits, wanted)
    assert len(network.stages) == stages
    assert len([*network.parameters()]) == len([*encoder.parameters()]) + 2


def test_the_list_of_networks() -> None:
    out = succeeds("models")
    assert all(any(line.split(" ")[0] == name for line in out.splitlines()) for name in names())
    row = next(line for line in out.splitlines() if line.startswith("resnet20 "))
    assert row.split()[1:4] == ["269,722", "40.55", "64"]
    assert "58.65" in succeeds("models", "size=96", "classes=10")
    narrow = succeeds("models", "mlp", "cnn", env={"COLUMNS": "60"}).splitlines()
    assert narrow[0].rstrip() == "mlp" and max(map(len, narrow)) <= 60
    assert narrow[1].rstrip() == "  parameters 201,482; MACs (M) 0.20; features 64; Two hidden"


def test_only_batches_with_rows_of_channels_are_for_kernels() -> None:
    pictures = torch.zeros(2, 3, 4, 4)
    assert not in_rows(pictures) and in_rows(pictures.to(memory_format=torch.channels_last))
    assert in_rows(torch.zeros(2, 3)) and not in_rows(torch.zeros(3, 2).T)
    # Which cannot be cut into pieces: a client may have no test pictures of its own.
    assert not in_rows(torch.zeros(0, 3, 4, 4).to(memory_format=torch.channels_last)) and not in_rows(torch.zeros(0, 3))
