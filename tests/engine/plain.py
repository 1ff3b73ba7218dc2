"""A federation written out plainly: a torch module, ``torch.optim.SGD`` and loops over clients, in float64.

This is what the engine and the methods are checked against. It shares with them the initial network, the division
of the data and the order of the samples, and nothing else: no layout, no flat vectors, no local step, no exact sums.

Tolerance. The engine computes in float32, whose rounding error is 6e-8 per operation. A step is a few hundred
roundings of random sign on values that the next step reuses, so after a handful of steps the vectors agree to a few
1e-7 of their length; ``TOLERANCE`` leaves a factor of about five. A wrong formula (a missing factor, a lost term)
is off by far more.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from isofed.draws import generator
from isofed.engine.plan import batches
from isofed.federation import Federation
from isofed.models import create, has_batch_norm

TOLERANCE = 2e-6

Named = dict[str, Tensor]
Gradients = dict[str, Tensor]
Correction = Callable[[Named, Gradients], None]


class Plain:
    """The same clients as a federation's, trained in the most ordinary way."""

    def __init__(self, run: Federation, dtype: torch.dtype = torch.float64) -> None:
        self.settings, self.world, self.dtype = run.settings, run.world, dtype
        s, dataset = run.settings, run.world.dataset
        self.network = create(s.model, classes=len(dataset.classes), shape=dataset.shape, norm=s.norm, seed=s.seed)
        self.network.to(dtype)
        self.sizes = [len(c) for c in run.world.clients]
        self.loss_sum = 0.0  # summed over the samples of all steps so far

    def part(self, name: str) -> tuple[Tensor, Tensor]:
        """Normalised pictures [N, C, H, W] and labels."""
        part, dataset = self.world.parts[name], self.world.dataset
        pixels = part.images.numpy().astype(np.float64)
        if part.images.dtype == torch.uint8:
            pixels = pixels / 255
        pixels = (pixels - np.array(dataset.mean)) / np.array(dataset.std)
        return torch.from_numpy(pixels.transpose(0, 3, 1, 2).copy()).to(self.dtype), part.labels

    def trained(self) -> list[str]:
        return [n for n, p in self.network.named_parameters() if p.requires_grad]

    def start(self) -> Named:
        return {k: v.detach().clone() for k, v in self.network.state_dict().items()}

    def batches(self, round: int, client: int) -> list[tuple[Tensor, Tensor]]:
        s = self.settings
        made = batches(
            self.world.clients[client], s, has_batch_norm(self.network), generator(s.seed, "order", round, client)
        )
        inputs, labels = self.part("train")
        rows = [torch.from_numpy(row[:size].astype(np.int64)) for row, size in zip(made.order, made.sizes, strict=True)]
        return [(inputs[row], labels[row]) for row in rows]

    def local(
        self, start: Named, round: int, client: int, correct: Correction | None = None, lr: float | None = None
    ) -> tuple[Named, list[Gradients]]:
        """One visit: the weights afterwards, and the gradient of each step before any correction."""
        return self.train(start, self.batches(round, client), correct, lr)

    def backward(self, inputs: Tensor, labels: Tensor) -> float:
        """Fill in the gradients of one batch, and give its loss."""
        loss = cross_entropy(self.network(inputs).logits, labels)
        loss.backward()
        return float(loss.detach())

    def train(
        self,
        start: Named,
        data: list[tuple[Tensor, Tensor]],
        correct: Correction | None = None,
        lr: float | None = None,
    ) -> tuple[Named, list[Gradients]]:
        s, net = self.settings, self.network
        net.load_state_dict(start)
        net.train()
        named = {n: p for n, p in net.named_parameters() if p.requires_grad}
        optimiser = torch.optim.SGD(
            named.values(),
            lr=s.lr if lr is None else lr,
            momentum=s.momentum,
            nesterov=s.nesterov,
            weight_decay=s.weight_decay,
        )
        seen = []
        for inputs, labels in data:
            optimiser.zero_grad()
            self.loss_sum += len(labels) * self.backward(inputs, labels)
            grads = {n: p.grad for n, p in named.items() if p.grad is not None}
            seen.append({n: g.clone() for n, g in grads.items()})
            if correct is not None:
                with torch.no_grad():
                    correct({n: p.detach() for n, p in named.items()}, grads)
            if s.clip is not None:
                nn.utils.clip_grad_norm_(named.values(), s.clip)
            optimiser.step()
        return self.start(), seen


def zeros(like: Named, names: list[str]) -> Named:
    return {n: torch.zeros_like(like[n]) for n in names}


def mean(models: list[Named], weights: list[float]) -> Named:
    """The weighted mean of whole models, running statistics included."""
    total = sum(weights)
    shares = torch.tensor([w / total for w in weights], dtype=torch.float64)
    return {k: torch.einsum("k,k...->...", shares, torch.stack([m[k] for m in models])) for k in models[0]}


def distance(found: Named, wanted: Named) -> float:
    """The largest distance of two tensors of the same name, relative to their length.

    Length is the norm, but at least that of entries of 0.1: biases of batch norm start at zero and stay small.
    """
    assert set(found) == set(wanted)
    return max(
        float((found[k].double() - wanted[k].double()).norm())
        / max(float(wanted[k].double().norm()), 0.1 * wanted[k].numel() ** 0.5)
        for k in wanted
    )


def participants(run: Federation, round: int) -> list[int]:
    """Who takes part in a round: drawn uniformly without replacement, floor(share times clients) of them."""
    count = len(run.world.clients)
    rng = generator(run.settings.seed, "clients", round)
    chosen = rng.choice(count, max(1, int(count * run.settings.participation + 1e-9)), replace=False)
    return sorted(int(c) for c in chosen)


def model_for(method: str) -> str:
    """The smallest network that has what a method asks for."""
    if "stochdepth" in method:
        return "resnet20"
    return "cnn" if "fedbn" in method or "gradaug" in method else "mlp"


def small(**settings: object) -> Federation:
    """A federation of four uneven clients that trains in a blink, without local momentum unless it is asked for."""
    usual: dict[str, object] = {
        "data": "synthetic:samples=100,test=20,classes=4",
        "partition": "quantity:1,min=8",
        "clients": 4,
        "rounds": 2,
        "batch_size": 16,
        "local_epochs": 2,
        "executor": "serial",
        "lr": 0.1,
        "momentum": 0.0,
        "model": "mlp",
    }
    return Federation(**(usual | settings))  # type: ignore[arg-type]


def vector(run: Federation, flat: Tensor) -> Named:
    """The tensors by name inside a method's vector over the shared trained weights."""
    return run.layout.views(flat, run.layout.shared_trained)
