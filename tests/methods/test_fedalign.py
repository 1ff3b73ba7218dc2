"""FedAlign, whole, against a last stage slimmed by hand with slices of its weights, in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d

from isofed.engine.replica import Job, Replica
from isofed.errors import UserError
from isofed.federation import Federation
from isofed.models import Network, Output, has_batch_norm
from tests.engine.plain import Correction, Gradients, Named, distance, small
from tests.methods.written import CPU, Written, after_steps, agree, cross, same_bytes, visit

KEPT = {32: 8, 64: 16}  # channels at a quarter of the width


def slim_stage(network: Network, cut: Tensor, kept: dict[int, int]) -> Tensor:
    """The last stage of ``cnn`` or ``mlp`` on its leading channels, layer by layer."""
    stage = list(network.stages.values())[-1]
    assert isinstance(stage, nn.Sequential)
    first = stage[0]
    if isinstance(first, nn.Linear):
        outputs = kept[first.out_features]
        x = cut @ first.weight[:outputs, : cut.shape[1]].T + first.bias[:outputs]
    else:
        assert isinstance(first, nn.Conv2d) and (first.stride, first.padding) == ((2, 2), (1, 1))
        outputs = kept[first.out_channels]
        bias = None if first.bias is None else first.bias[:outputs]
        x = conv2d(cut, first.weight[:outputs, : cut.shape[1]], bias, stride=2, padding=1)
        norm = stage[1]
        if isinstance(norm, nn.BatchNorm2d):  # with the statistics of this batch, which are not kept
            centre, spread = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), correction=0, keepdim=True)
            scale, shift = norm.weight[:outputs].view(-1, 1, 1), norm.bias[:outputs].view(-1, 1, 1)
            x = (x - centre) / (spread + 1e-5).sqrt() * scale + shift
    return x * (x > 0)


def pooled(a: Tensor, size: int) -> Tensor:
    """Means over equal squares; one place where there are none."""
    if a.dim() == 2:
        return a[:, :, None]
    batch, channels, height, _ = a.shape
    side = height // size
    return a.reshape(batch, channels, size, side, size, side).mean((3, 5)).flatten(2)


def lipschitz(a: Tensor, b: Tensor, iterations: int) -> Tensor:
    """The spectral norm of A B' / places of each sample, by power iteration from ones."""
    size = 1 if b.dim() == 2 else b.shape[2]
    transmitting = torch.einsum("bip,bjp->bij", pooled(a, size), pooled(b, size)) / size**2
    gram = torch.einsum("bik,bjk->bij", transmitting, transmitting)
    v = torch.ones(gram.shape[:2]).double()
    for _ in range(iterations):
        v = torch.einsum("bij,bj->bi", gram, v / v.pow(2).sum(1, keepdim=True).sqrt())
    return v.pow(2).sum(1) ** 0.25


class Aligned(Written):
    def __init__(
        self,
        run: Federation,
        mu: float = 0.45,
        kept: dict[int, int] = KEPT,
        rescale: bool = True,
        clip: float | None = 10.0,
        iterations: int = 10,
        whole: bool = False,
    ) -> None:
        super().__init__(run, self.aligned)
        self.whole = whole
        self.mu, self.kept, self.rescale, self.clip, self.iterations = mu, kept, rescale, clip, iterations
        self.lengths: list[float] = []  # of the gradients before they are clipped

    def term(self, output: Output) -> Tensor:
        """The mean squared difference of the two estimates."""
        inside, outside = (t.detach() for t in list(output.stages.values())[-2:])
        cut = inside if self.whole else inside[:, : self.kept[inside.shape[1]]]
        teacher = lipschitz(inside, outside, self.iterations)
        student = lipschitz(cut, slim_stage(self.network, cut, self.kept), self.iterations)
        return (student - teacher).pow(2).mean()

    def aligned(self, output: Output, inputs: Tensor, labels: Tensor) -> Tensor:
        loss, term = cross(output, inputs, labels), self.term(output)
        return loss + self.mu * (loss.detach() / term.detach() if self.rescale else 1) * term

    def local(
        self, start: Named, round: int, client: int, correct: Correction | None = None, lr: float | None = None
    ) -> tuple[Named, list[Gradients]]:
        def scale_down(weights: Named, gradients: Gradients) -> None:
            length = sum(float(g.pow(2).sum()) for g in gradients.values()) ** 0.5
            self.lengths.append(length)
            if self.clip is not None and length > self.clip:
                for gradient in gradients.values():
                    gradient *= self.clip / length

        return super().local(start, round, client, scale_down, lr)


# Where the clip acts, its 1e-6 beside the length (as in torch's own clip_grad_norm_) is 1e-6 of a gradient and more,
# which moves the weights by about 1e-7 of their length.
@pytest.mark.parametrize(
    ("method", "settings", "known"),
    [
        ("fedalign", {"model": "cnn", "local_epochs": 1}, {}),
        ("fedalign", {"rounds": 3, "participation": 0.5}, {}),
        ("fedalign:mu=2,clip=3", {"momentum": 0.5, "rounds": 1}, {"mu": 2, "clip": 3.0}),
        ("fedalign:rescale=false", {}, {"rescale": False}),
        ("fedalign:rescale=no,clip=none", {"model": "cnn", "rounds": 1, "lr": 0.01}, {"rescale": False, "clip": None}),
        ("fedalign:clip=none", {"rounds": 1}, {"clip": None}),
        ("fedalign:iterations=1", {"model": "cnn", "rounds": 1}, {"iterations": 1}),
        ("fedalign:width=0.5", {"model": "cnn", "rounds": 1}, {"kept": {32: 16, 64: 32}}),
        ("fedalign", {"model": "cnn", "norm": "none", "rounds": 1, "lr": 0.03}, {}),
        ("fedalign:input=whole", {"model": "cnn", "rounds": 1}, {"whole": True}),
        ("fedalign:input=whole,rescale=no", {"rounds": 1}, {"whole": True, "rescale": False}),
    ],
)  # fmt: skip
def test_fedalign(method: str, settings: dict[str, Any], known: dict[str, Any]) -> None:
    run = small(method=method, **settings)
    plain = Aligned(run, **known)
    agree(run, plain)
    if "clip=3" in method:
        assert max(plain.lengths) > 3.01 and min(plain.lengths) < 2.99
    assert distance(run.fit().weights, small(**settings).fit().weights) > 1e-4


@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_a_weight_of_zero_is_fedavg_and_the_default_is_not(model: str) -> None:
    base = small(model=model)
    assert same_bytes(small(method="fedalign:mu=0", model=model), base)
    assert same_bytes(small(method="fedalign:mu=0,clip=0.001", model=model), base)  # off altogether
    assert distance(small(method="fedalign", model=model).fit().weights, base.fit().weights) > 1e-4


@pytest.mark.parametrize("model", ["mlp", "cnn"])
@pytest.mark.parametrize("mu", [0.45, 1.7])
def test_the_term_is_mu_times_the_base_loss_in_value(model: str, mu: float) -> None:
    one_step: dict[str, Any] = {"model": model, "local_epochs": 1}  # at client 2, which has eleven samples
    base = visit(small(**one_step), 2)
    aligned = visit(small(method=f"fedalign:mu={mu}", **one_step), 2)
    assert base.steps == 1
    assert aligned.loss == pytest.approx((1 + mu) * base.loss, rel=1e-6)
    # Also where somebody else decides the base loss.
    other = visit(small(method="fedrs:alpha=0.1", partition="pathological:2", batch_size=32, **one_step), 2)
    both = visit(small(method=f"fedrs:alpha=0.1+fedalign:mu={mu}", partition="pathological:2", batch_size=32,
                       **one_step), 2)  # fmt: skip
    assert both.steps == 1 and both.loss == pytest.approx((1 + mu) * other.loss, rel=1e-6)


def test_without_rescaling_it_is_mu_times_the_squared_difference() -> None:
    for model in ("mlp", "cnn"):
        one_step: dict[str, Any] = {"model": model, "local_epochs": 1}
        run = small(method="fedalign:mu=3,rescale=false", **one_step)
        plain = Aligned(run)
        inputs, _ = plain.batches(1, 2)[0]
        term = float(plain.term(plain.network.train()(inputs)).detach())
        base = visit(small(**one_step), 2)
        assert visit(run, 2).loss == pytest.approx(base.loss + 3 * term, rel=1e-5)
        assert term > 1e-3


def named_gradients(method: str, model: str) -> Named:
    step = after_steps(small(method=method, model=model)).local.step
    return {n: g.clone() for n, g in step.named(step.grad).items()}


@pytest.mark.parametrize("rescale", ["true", "false"])
@pytest.mark.parametrize(("model", "last"), [("cnn", "stages.stage3."), ("mlp", "stages.stage2.")])
def test_only_the_slim_part_of_the_last_stage_learns_from_it(model: str, last: str, rescale: str) -> None:
    with_it = named_gradients(f"fedalign:clip=none,rescale={rescale}", model)
    without = named_gradients("fedalign:mu=0", model)
    inside = 16 if model == "mlp" else 8
    for name, gradient in with_it.items():
        if not name.startswith(last):
            assert torch.equal(gradient, without[name]), name
            continue
        gained = (gradient - without[name]).abs()
        assert float(gained[:16].max()) > 1e-4, name
        assert float(gained[16:].max()) == 0, name
        if gained.dim() > 1:
            assert float(gained[:16, :inside].max()) > 1e-4 and float(gained[:, inside:].max()) == 0
    assert sum(name.startswith(last) for name in with_it) == (3 if model == "cnn" else 2)


def test_the_teacher_does_not_learn() -> None:
    # By finite differences: the term falls along its gradient with the teacher held fixed.
    run = small(method="fedalign:rescale=false,clip=none,mu=1")
    plain = Aligned(run)
    gained = {n: g - named_gradients("fedavg", "mlp")[n] for n, g in
              named_gradients("fedalign:rescale=false,clip=none,mu=1", "mlp").items()}  # fmt: skip
    inputs, _ = plain.batches(1, 0)[0]
    network = plain.network.train()
    output = network(inputs)
    inside, outside = (t.detach() for t in list(output.stages.values())[-2:])
    teacher = lipschitz(inside, outside, 10).detach()
    weight = network.stages["stage2"][0].weight  # type: ignore[index]

    def value() -> float:
        student = lipschitz(inside[:, :16], slim_stage(network, inside[:, :16], KEPT), 10)
        return float((student - teacher).pow(2).mean().detach())

    for place in ((0, 0), (7, 3), (15, 15)):
        with torch.no_grad():
            weight[place] += 1e-6
            up = value()
            weight[place] -= 2e-6
            down = value()
            weight[place] += 1e-6
        slope = (up - down) / 2e-6
        assert float(gained["stages.stage2.0.weight"][place]) == pytest.approx(slope, rel=1e-3, abs=1e-5)


def test_running_statistics_are_those_of_the_whole_stage() -> None:
    aligned, plain = (after_steps(small(method=m, model="cnn")) for m in ("fedalign:mu=5", "fedavg"))
    assert has_batch_norm(aligned.local.network)
    wanted = dict(plain.local.network.named_buffers())
    found = dict(aligned.local.network.named_buffers())
    assert len(found) == 6
    for name, value in found.items():
        assert torch.equal(value, wanted[name]), name
        assert not torch.equal(value, torch.zeros_like(value)) and not torch.equal(value, torch.ones_like(value))
    assert not torch.equal(aligned.local.step.grad, plain.local.step.grad)


@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_the_clip_holds_in_every_step(model: str) -> None:
    longest = {}
    for option in ("clip=0.3", "clip=none", "clip=1000"):
        run = small(method=f"fedalign:{option}", model=model)
        replica = Replica(run.world, CPU)
        visit = replica._arrive(Job(1, 0, 0.1, 0.25), run.state.weights, {}, None)
        replica.local.network.train()
        lengths = []
        for size in visit.sizes:
            replica.local.take(size)
            lengths.append(float(replica.local.step.grad.norm()))
        longest[option] = max(lengths)
        if option == "clip=0.3":
            assert max(lengths) <= 0.3 * (1 + 1e-6)  # the norm of a float32 vector is itself rounded
            assert max(lengths) == pytest.approx(0.3, rel=1e-5)
    assert longest["clip=none"] == longest["clip=1000"] > 0.5
    assert same_bytes(small(method="fedalign:clip=none", model=model), small(method="fedalign:clip=1e9", model=model))


def test_a_stage_that_gives_nothing_has_no_term() -> None:
    # All units of the last stage dead: both estimates are zero, and so are their difference and its gradient.
    run = small(method="fedalign", local_epochs=1)
    named = run.layout.views(run.state.weights)
    named["stages.stage2.0.weight"].zero_()
    named["stages.stage2.0.bias"].fill_(-1)
    outcome = visit(run, 2)
    base = small(local_epochs=1)
    base.state.weights.copy_(run.state.weights)
    assert torch.equal(outcome.update, visit(base, 2).update)
    assert torch.isfinite(outcome.update).all() and outcome.loss > 0


def test_on_a_residual_network() -> None:
    # Three stages of 16, 32 and 64 channels with shortcuts: the last runs at a quarter of its width, too.
    run = small(
        method="fedalign:clip=none", model="resnet20", rounds=1, local_epochs=1, data="synthetic:samples=40,test=8"
    )
    base = small(model="resnet20", rounds=1, local_epochs=1, data="synthetic:samples=40,test=8")
    aligned, plain = (after_steps(r) for r in (run, base))
    last = list(aligned.local.network.stages)[-1]
    one, other = (r.local.step.named(r.local.step.grad) for r in (aligned, plain))
    moved = {n for n in one if not torch.equal(one[n], other[n])}
    assert moved and all(n.startswith(f"stages.{last}.") for n in moved)
    assert all(torch.equal(b, dict(plain.local.network.named_buffers())[n])
               for n, b in aligned.local.network.named_buffers())  # fmt: skip


def test_a_stage_at_its_full_width_is_not_slimmed() -> None:
    with pytest.raises(UserError, match="width of method 'fedalign' must be above 0 and below 1, not 1"):
        small(method="fedalign:width=1")


SEQUENTIAL = """
from torch import nn
from isofed.models import adapt


def build(shape, classes):
    layers = [nn.Conv2d(shape[0], 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU()]
    return adapt(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()), nn.Linear(32, classes))
"""


def test_layers_behind_the_last_that_can_be_slimmed_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(SEQUENTIAL)
    ends = {}
    for method in ("fedavg", "fedalign:clip=none"):
        run = small(method=method, model=f"{tmp_path}/own.py:build", rounds=1, local_epochs=1)
        ends[method] = run.fit().weights
    name = next(name for name, weight in ends["fedavg"].items() if weight.shape == (32, 16, 3, 3))
    assert float((ends["fedavg"][name] - ends["fedalign:clip=none"][name]).norm()) > 1e-3
