"""FedUV's Table 1, FedAvg on CIFAR-100, once more without isofed: to see whether a number is the setting's or ours.

Network, split, pictures, training and averaging are written here in plain PyTorch. Only the settings are those of
``isofed paper feduv table1``: ten clients by dirichlet(0.01), ten epochs of SGD in batches of 128, a cosine schedule.
A CUDA graph is made of the whole step, which would take too long otherwise.

    python benchmarks/plain_federation.py --data DATA --rounds 15 --init kaiming
"""

from __future__ import annotations

import argparse
import math
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

CLIENTS, EPOCHS, BATCH, LR, MOMENTUM, DECAY = 10, 10, 128, 0.01, 0.9, 1e-5
MEAN, STD = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)


def read(path: Path) -> tuple[Tensor, Tensor]:
    """Pictures and labels of a file of CIFAR-100's binary version."""
    rows = np.fromfile(path, np.uint8).reshape(-1, 3074)
    return torch.from_numpy(rows[:, 2:].reshape(-1, 3, 32, 32).copy()), torch.from_numpy(rows[:, 1].astype(np.int64))


def split(labels: np.ndarray, rng: np.random.RandomState) -> list[Tensor]:
    """Each class by Dirichlet shares; a client that has its even part already gets no more."""
    while True:
        parts: list[list[int]] = [[] for _ in range(CLIENTS)]
        for label in range(100):
            mine = np.flatnonzero(labels == label)
            rng.shuffle(mine)
            share = rng.dirichlet(np.repeat(0.01, CLIENTS))
            share = np.array([q * (len(part) < len(labels) / CLIENTS) for q, part in zip(share, parts, strict=True)])
            cuts = (np.cumsum(share / share.sum()) * len(mine)).astype(int)[:-1]
            for part, more in zip(parts, np.split(mine, cuts), strict=True):
                part.extend(more.tolist())
        if min(map(len, parts)) >= 10:
            return [torch.tensor(part) for part in parts]


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.one, self.norm1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False), nn.BatchNorm2d(outside)
        self.two, self.norm2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False), nn.BatchNorm2d(outside)
        shorter = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))
        self.shortcut = shorter if stride > 1 or inside != outside else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.relu(self.norm1(self.one(x)))
        return functional.relu(self.norm2(self.two(inner)) + self.shortcut(x))


class Plain(nn.Module):
    """FedUV's ResNet-18 with its projector."""

    def __init__(self, kaiming: bool) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU())
        widths = (64, 64, 128, 256, 512)
        pairs = [(Block(a, b, 2), Block(b, b, 1)) for a, b in pairwise(widths)]
        self.body = nn.Sequential(*(block for pair in pairs for block in pair))
        dense = [layer for _ in range(2) for layer in (nn.Linear(512, 512), nn.BatchNorm1d(512), nn.ReLU())]
        self.rest = nn.Sequential(*dense, nn.Linear(512, 100))
        for module in self.modules() if kaiming else ():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.rest(self.body(self.stem(x)).mean((2, 3)))
        return logits


class Trainer:
    """One network on the GPU and its captured step."""

    def __init__(self, kaiming: bool) -> None:
        self.network = Plain(kaiming).cuda().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.weights = list(self.network.parameters())
        self.momentum = [torch.zeros_like(w) for w in self.weights]
        shape = (BATCH, 3, 32, 32)
        self.x = torch.zeros(shape, device="cuda").to(memory_format=torch.channels_last)
        self.y, self.lr = torch.zeros(BATCH, dtype=torch.int64, device="cuda"), torch.tensor(LR, device="cuda")
        self.first = {k: v.clone() for k, v in self.network.state_dict().items()}
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(aside)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.step()

    def step(self) -> None:
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            logits = self.network(self.x)
        loss = functional.cross_entropy(logits.float(), self.y)
        gradients = torch.autograd.grad(loss, self.weights)
        with torch.no_grad():
            gradients = torch._foreach_add(gradients, self.weights, alpha=DECAY)
            torch._foreach_mul_(self.momentum, MOMENTUM)
            torch._foreach_add_(self.momentum, gradients)
            torch._foreach_sub_(self.weights, torch._foreach_mul(self.momentum, self.lr))

    @torch.no_grad()
    def take(self, state: dict[str, Tensor]) -> None:
        for name, value in self.network.state_dict().items():
            value.copy_(state[name])
        for velocity in self.momentum:
            velocity.zero_()


def normalised(pictures: Tensor) -> Tensor:
    mean, std = (torch.tensor(v, device=pictures.device).view(3, 1, 1) for v in (MEAN, STD))
    return (pictures.float() / 255 - mean) / std


def augmented(pictures: Tensor) -> Tensor:
    """Each one cut out of itself with a border of four, and turned round or not."""
    x, count = functional.pad(normalised(pictures), (4, 4, 4, 4)), len(pictures)
    rows, columns = (torch.randint(0, 9, (count, 1), device="cuda") + torch.arange(32, device="cuda") for _ in range(2))
    x = x[torch.arange(count, device="cuda")[:, None, None], :, rows[:, :, None], columns[:, None, :]]
    x = x.permute(0, 3, 1, 2)
    return torch.where((torch.rand(count, device="cuda") < 0.5)[:, None, None, None], x.flip(3), x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with cifar-100-binary")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--init", choices=("pytorch", "kaiming"), default="pytorch", help="rule of the first weights")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU")
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    (x, y), (test_x, test_y) = (read(arguments.data / "cifar-100-binary" / f"{n}.bin") for n in ("train", "test"))
    clients = [part.cuda() for part in split(y.numpy(), np.random.RandomState(1))]
    x, y, test_x, test_y = x.cuda(), y.cuda(), test_x.cuda(), test_y.cuda()
    trainer = Trainer(arguments.init == "kaiming")
    shared, began = trainer.first, time.perf_counter()
    for number in range(arguments.rounds):
        trainer.lr.fill_(LR * (1 + math.cos(math.pi * number / arguments.rounds)) / 2)
        total = {k: torch.zeros_like(v, dtype=torch.float64) for k, v in shared.items()}
        for part in clients:
            trainer.take(shared)
            trainer.network.train()
            for _ in range(EPOCHS):
                order = part[torch.randperm(len(part), device="cuda")]
                pictures, labels = augmented(x[order]), y[order]
                for start in range(0, len(order) - BATCH + 1, BATCH):
                    trainer.x.copy_(pictures[start : start + BATCH])
                    trainer.y.copy_(labels[start : start + BATCH])
                    trainer.graph.replay()
            for name, value in trainer.network.state_dict().items():
                total[name] += value.double() * (len(part) / len(y))
        shared = {k: v.to(shared[k].dtype) for k, v in total.items()}
        trainer.take(shared)
        trainer.network.eval()
        with torch.no_grad():
            parts = zip(test_x.split(1000), test_y.split(1000), strict=True)
            right = sum(int((trainer.network(normalised(a)).argmax(1) == b).sum()) for a, b in parts)
        print(f"round {number + 1}: {100 * right / len(test_y):.1f} %, {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
