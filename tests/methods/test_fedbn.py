"""FedBN: batch norm stays at home, and each client is judged by its own model."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

from isofed.errors import UserError
from isofed.federation import Federation
from isofed.layout import Policy
from isofed.methods import parse
from isofed.models import Network, create
from tests.engine.plain import TOLERANCE, Named, Plain, distance, mean, participants, small


def norm_names(network: nn.Module) -> list[str]:
    return [
        f"{path}.{name}"
        for path, module in network.named_modules()
        if "BatchNorm" in type(module).__name__
        for name in ("weight", "bias", "running_mean", "running_var")
    ]


def home_of(run: Federation, client: int) -> Named:
    state, layout = run.state.clients[client]["isofed.home"], run.layout
    cut = layout.home_trained.stop - layout.home_trained.start
    return layout.views(state[:cut], layout.home_trained) | layout.views(state[cut:], layout.home_statistics)


def by_hand(run: Federation) -> tuple[Named, dict[int, Named]]:
    plain = Plain(run)
    server = plain.start()
    local = norm_names(plain.network)
    own = {k: {n: server[n] for n in local} for k in range(len(plain.sizes))}
    for round in range(1, run.settings.rounds + 1):
        who = participants(run, round)
        models = [plain.local(server | own[k], round, k)[0] for k in who]
        averaged = mean(models, [float(plain.sizes[k]) for k in who])
        server = {n: v if n in local else averaged[n] for n, v in server.items()}
        own |= {k: {n: m[n] for n in local} for k, m in zip(who, models, strict=True)}
    return server, own


@pytest.mark.parametrize(("participation", "momentum"), [(1.0, 0.9), (0.5, 0.0)])
def test_fedbn(participation: float, momentum: float) -> None:
    run = small(method="fedbn", model="cnn", participation=participation, momentum=momentum, rounds=3)
    run.fit()
    server, own = by_hand(run)
    local = norm_names(Plain(run).network)
    found = run.layout.views(run.state.weights)
    shared = [n for n in server if n not in local]
    assert distance({n: found[n] for n in shared}, {n: server[n] for n in shared}) < TOLERANCE
    for k in run.state.clients:
        # Three rounds of batch norm on batches of a few samples amplify float32 rounding a little more.
        assert distance(home_of(run, k), own[k]) < 10 * TOLERANCE
    # Fact: what is at home differs between clients.
    one, two = sorted(run.state.clients)[:2]
    for name in local:
        assert not torch.allclose(home_of(run, one)[name], home_of(run, two)[name], rtol=1e-4), name


def test_clients_that_do_not_take_part_keep_theirs() -> None:
    run = small(method="fedbn", model="cnn", participation=0.25, rounds=8)
    seen: dict[int, torch.Tensor] = {}
    from isofed.progress import Watcher

    class Look(Watcher):
        def round(self, line: dict[str, object]) -> None:
            (client,) = participants(run, int(str(line["round"])))
            for k, state in run.state.clients.items():
                changed = k not in seen or not torch.equal(seen[k], state["isofed.home"])
                assert changed == (k == client)
                seen[k] = state["isofed.home"].clone()

    run.fit(Look())
    assert len(seen) == len({participants(run, r)[0] for r in range(1, 9)}) > 1


NESTED = '''
    import torch
    from torch import nn
    from isofed.models import Network

    class Block(nn.Module):
        """A residual block as ResNets have them: its batch norms carry no telling names."""

        def __init__(self, inside, outside):
            super().__init__()
            self.conv = nn.Conv2d(inside, outside, 3, 2, 1, bias=False)
            self.second = nn.BatchNorm2d(outside)
            self.downsample = nn.Sequential(nn.Conv2d(inside, outside, 1, 2, bias=False), nn.BatchNorm2d(outside))

        def forward(self, x):
            return torch.relu(self.second(self.conv(x)) + self.downsample(x))

    def build(shape, classes):
        stages = {"one": Block(shape[0], 8), "two": nn.Sequential(Block(8, 8), nn.GroupNorm(2, 8))}
        return Network(stages, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()), nn.Linear(8, classes), 8)
'''


@pytest.fixture
def nested(tmp_path: Path) -> str:
    (tmp_path / "nested.py").write_text(textwrap.dedent(NESTED))
    return f"{tmp_path}/nested.py:build"


def test_batch_norm_is_found_by_type(nested: str) -> None:
    network = create(nested, classes=3, shape=(1, 8, 8))
    assert isinstance(network, Network)
    shared = parse("fedbn").share(network)
    assert sorted(shared) == sorted(norm_names(network))
    assert set(shared.values()) == {Policy.HOME}
    assert "stages.one.downsample.1.weight" in shared and "stages.two.0.downsample.1.running_var" in shared
    assert not any("stages.two.1." in name for name in shared)  # the group norm


def test_nested_batch_norm_stays_at_home_in_a_run(nested: str) -> None:
    run = small(method="fedbn", model=nested, rounds=1)
    result = run.fit()
    inside = home_of(run, 0)
    assert not torch.equal(inside["stages.one.downsample.1.running_mean"], torch.zeros(8))
    other = home_of(run, 1)
    for name in inside:
        assert not torch.equal(inside[name], other[name]), name
    assert torch.equal(result.weights["stages.one.downsample.1.running_mean"], torch.zeros(8))  # nobody sent it


def test_less_is_sent() -> None:
    avg, bn = small(model="cnn", rounds=1).fit(), small(model="cnn", rounds=1, method="fedbn").fit()
    numbers = 4 * (16 + 32 + 64)
    assert avg.bytes_up - bn.bytes_up == avg.bytes_down - bn.bytes_down == 4 * numbers * 4  # bytes, clients


def accuracy(plain: Plain, model: Named, index: torch.Tensor) -> float:
    inputs, labels = plain.part("test")
    plain.network.load_state_dict(model)
    plain.network.eval()
    with torch.no_grad():
        guess = plain.network(inputs[index]).logits.argmax(1)
    return float((guess == labels[index]).double().mean())


def test_each_client_is_judged_on_its_own_domain() -> None:
    data = "synthetic:samples=180,test=90,classes=3,domains=3"
    run = small(method="fedbn", model="cnn", data=data, partition="domain", clients=3, rounds=3)
    result = run.fit()
    plain = Plain(run)
    server, own = by_hand(run)
    domains = run.world.dataset.test.domains
    assert domains is not None
    wanted = {str(k): accuracy(plain, server | own[k], (domains == k).nonzero()[:, 0]) for k in range(3)}
    line = result.history[-1]
    assert line["client_accuracy"] == pytest.approx(wanted)
    assert result.accuracy == pytest.approx(sum(wanted.values()) / 3)


def test_without_domains_each_client_is_judged_on_the_whole_test_part() -> None:
    run = small(
        method="fedbn", model="cnn", rounds=3, participation=0.5, data="synthetic:samples=120,test=80,classes=4"
    )
    result = run.fit()
    plain = Plain(run)
    server, own = by_hand(run)
    wanted = {str(k): accuracy(plain, server | own[k], torch.arange(80)) for k in range(4)}  # also who never came
    assert result.history[-1]["client_accuracy"] == pytest.approx(wanted)
    assert result.accuracy == pytest.approx(sum(wanted.values()) / 4)


def test_fedbn_composes_with_server_steps_on_what_is_shared() -> None:
    run = small(method="fedbn+scaffold+fedavgm", model="cnn", rounds=2)
    run.fit()
    part = run.layout.shared_trained
    assert run.state.server["scaffold.c"].numel() == run.state.server["fedavgm.v"].numel() == part.stop - part.start
    assert set(run.state.clients[0]) == {"scaffold.ck", "isofed.home"}


def test_a_network_without_batch_norm_is_refused() -> None:
    with pytest.raises(UserError, match="fedbn keeps batch norm at home, and this network has none"):
        small(method="fedbn", model="cnn", norm="group:2")
