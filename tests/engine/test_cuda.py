"""On a GPU: every method's whole federation runs there, repeats bit for bit, and agrees with the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from isofed import Federation
from isofed.engine.sgd import put
from isofed.methods import names, parse

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]
SMALL: dict[str, Any] = {
    "data": "synthetic:samples=320,test=64,size=8",
    "clients": 3,
    "partition": "dirichlet:0.5",
    "rounds": 2,
    "local_epochs": 1,
    "lr": 0.02,
    "augment": "crop:1+flip",
    "executor": "serial",
}


@pytest.mark.parametrize(
    "method",
    [*names(), "scaffold:option=1", "fedprox+fednova+fedavgm", "feddyn:scale_alpha=true", "mixup+spherefed+fedsam"],
)
def test_a_federation_on_the_gpu(method: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if method == "gaussian":
        accountant = pytest.importorskip("dp_accounting")
        if not hasattr(accountant, "get_epsilon_gaussian"):
            pytest.skip("the accountant of privacy is an older one")
    model = "resnet20" if "stochdepth" in method else "cnn"
    settings = SMALL | {"method": method, "model": model}
    if "statistics" in parse(method).guards:
        settings["norm"] = "group:2"
    one, two = (Federation(**settings, device="cuda", out=tmp_path / n).fit() for n in ("one", "two"))
    # 1e-6 of a convolution's result decide on which side of zero some number is, and twenty layers and two rounds later
    # that is 2 % of the update; PyTorch's own on a processor are nearer to what a GPU computes.
    monkeypatch.setenv("ISOFED_FUSED", "0")
    host = Federation(**settings, device="cpu").fit()
    assert all(torch.equal(one.weights[k], two.weights[k]) for k in one.weights)
    start = Federation(**settings).world.network().state_dict()
    moved = sum(float((v.cpu() - start[k]).norm() ** 2) for k, v in one.weights.items()) ** 0.5
    apart = sum(float((v.cpu() - host.weights[k]).norm() ** 2) for k, v in one.weights.items()) ** 0.5
    # Two rounds of float32 with other kernels: rounding, amplified by training, but nothing like another result.
    assert moved > 0.05 and apart < 0.02 * moved


def test_a_run_goes_on_from_gpu_to_cpu(tmp_path: Any) -> None:
    run = Federation(**SMALL, method="scaffold", device="cuda", out=tmp_path / "run")
    run.fit()
    assert (tmp_path / "run" / "result.json").unlink() is None
    again = Federation.resume(tmp_path / "run", device="cpu").fit()
    assert again.rounds == 2 and again.weights.keys() == run.layout.views(run.state.weights).keys()


def test_bf16_trains(tmp_path: Any) -> None:
    result = Federation(**SMALL, device="cuda", precision="bf16").fit()
    assert result.history[-1]["local_loss"] < result.history[0]["local_loss"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(70, 30, 3, 3), (64, 32, 1, 1), (33, 65), (5,)])
def test_a_gradient_of_any_form_gets_to_its_place(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    gradient = torch.randn(shape, device="cuda").to(dtype)
    forms = [gradient, gradient.t()[...].clone().t() if gradient.dim() == 2 else gradient.expand(shape)]
    forms += [gradient.to(memory_format=torch.channels_last)] if gradient.dim() == 4 else []
    for form in forms:
        vector = torch.full((gradient.numel() + 32,), 7.0, device="cuda")
        place = vector[16:-16].view(shape)
        if gradient.dim() == 4:
            place = vector[16:-16].view(shape[0], *shape[2:], shape[1]).permute(0, 3, 1, 2)
        put(place, form)
        assert torch.equal(place, gradient.float())
        put(place, form, add=True)
        assert torch.equal(place, 2 * gradient.float())
        assert (vector[:16] == 7).all() and (vector[-16:] == 7).all()
