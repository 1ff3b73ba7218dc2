"""Features on a plane, and the samples that are looked at."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.manifold import TSNE

import isofed
from isofed.data import Dataset, Part, load
from isofed.diagnostics import fixed_sample, observe, tsne
from isofed.errors import NotFinite, UserError
from isofed.models import create


def test_groups_that_are_apart_stay_apart() -> None:
    rng = np.random.default_rng(0)
    group = torch.arange(90) % 3
    z = 10 * torch.eye(3, 20)[group] + torch.from_numpy(rng.normal(size=(90, 20))).float()
    plane = tsne(z, perplexity=15)
    assert plane.shape == (90, 2) and plane.dtype == torch.float64 and torch.equal(plane, tsne(z, perplexity=15))
    apart = torch.cdist(plane, plane).fill_diagonal_(torch.inf)
    assert bool((group[apart.argmin(1)] == group).all())
    usual = TSNE(perplexity=89 / 3, init="pca", random_state=0).fit_transform(z.double().numpy())
    assert np.array_equal(tsne(z).numpy(), usual)  # 30 are asked for, of 90 samples a third less one is possible
    assert tsne(z[:5]).shape == (5, 2)  # fewer samples than the perplexity asks for
    with pytest.raises(ValueError, match="four samples"):
        tsne(z[:3])
    with pytest.raises(NotFinite, match="a t-SNE needs finite features"):
        tsne(z * torch.nan)


def test_without_scikit_learn_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "sklearn.manifold", None)
    with pytest.raises(UserError, match="pip install .*'scikit-learn>="):
        tsne(torch.randn(10, 3))


def test_a_sample_is_always_the_same_and_normalised_as_in_training() -> None:
    dataset = load("synthetic:samples=200,test=50")
    x, y = fixed_sample(dataset, count=64)
    again, _ = fixed_sample(dataset, count=64)
    other, _ = fixed_sample(dataset, count=64, seed=1)
    assert torch.equal(x, again) and not torch.equal(x, other) and len(x) == len(y) == 64
    whole, labels = fixed_sample(dataset, count=None)
    pixels = dataset.train.images.double() / (255 if dataset.train.images.dtype == torch.uint8 else 1)
    wanted = (pixels - torch.tensor(dataset.mean)) / torch.tensor(dataset.std)
    torch.testing.assert_close(whole.double(), wanted.permute(0, 3, 1, 2), rtol=1e-4, atol=1e-5)
    assert torch.equal(labels, dataset.train.labels)
    # Drawn without replacement, with their own labels.
    where = (x.flatten(1)[:, None] == whole.flatten(1)).all(2).nonzero()[:, 1]
    assert len(where) == 64 and torch.equal(labels[where], y)
    assert len(fixed_sample(dataset, "test", count=1000)[0]) == 50
    with pytest.raises(ValueError, match="train or test"):
        fixed_sample(dataset, "validation")


@pytest.mark.parametrize("count", [None, 20, 100])
def test_a_sample_leaves_the_data_as_they_are(count: int | None) -> None:
    # Floating-point pictures need no conversion, and a part that is wanted whole no selection.
    images, labels = np.random.default_rng(0).normal(5, 2, (20, 4, 4, 1)).astype(np.float32), np.arange(20) % 2
    before = images.copy()
    dataset = Dataset.build("mine", classes=["a", "b"], train=Part(images, labels), test=Part(images[:6], labels[:6]))
    x, _ = fixed_sample(dataset, count=count)
    assert np.array_equal(images, before) and np.array_equal(dataset.train.images.numpy(), before)
    assert torch.equal(x, fixed_sample(dataset, count=count)[0]) and abs(float(x.mean())) < 1e-5


def test_observing_gives_what_the_run_judged_by() -> None:
    run = isofed.Federation(data="synthetic:samples=200,test=50", clients=2, partition="iid", rounds=1)
    result = run.fit()
    network = run.world.network()
    network.load_state_dict(result.weights)
    x, y = fixed_sample(run.world.dataset, "test", count=None)
    before = {k: v.clone() for k, v in network.state_dict().items()}
    seen = observe(network, x, batch_size=17)
    assert float((seen.logits.argmax(1) == y).double().mean()) == pytest.approx(result.accuracy)
    torch.testing.assert_close(network.head(seen.features), seen.logits, rtol=1e-4, atol=1e-5)
    assert network.training and all(torch.equal(v, before[k]) for k, v in network.state_dict().items())
    assert not seen.logits.requires_grad
    assert observe(create("mlp", classes=3, shape=(1, 4, 4)), torch.zeros(2, 1, 4, 4)).features.shape == (2, 64)
