"""Questions to all clients after the last round, whose answers are summed for the method that asks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isofed.draws import generator
from isofed.engine.replica import Job, one_thread
from isofed.engine.serial import Executor, States
from isofed.engine.world import World
from isofed.layout import Layout, Policy, Tensors
from isofed.methods import Final, Method
from isofed.methods.given import anatomy, check_anatomy, check_answer


@dataclass(frozen=True)
class Questions:
    """Asks the clients of a world, and lets methods use what they answer."""

    world: World
    layout: Layout
    device: torch.device

    def ask(
        self, name: str, method: Method, model: Tensor, sent: Tensors, states: States, executor: Executor
    ) -> tuple[Tensor, dict[str, Any]]:
        """The model that a method makes of the answers to its question, and a line for the record."""
        s, fractions = self.world.settings, self.world.fractions()
        clients = [c for c, samples in enumerate(self.world.clients) if len(samples)]
        # A schedule may have ended near zero; whoever trains once more starts from the learning rate as it was set.
        jobs = [Job(s.rounds + 1, c, s.lr, float(fractions[c])) for c in clients]
        total: Tensors = {}
        size = 0
        # In a fixed order, so that plain sums do.
        for answer in executor.answer(name, jobs, model, sent, states):
            size += sum(value.nbytes for value in answer.values())
            for key, value in answer.items():
                if key not in total:
                    total[key] = value.clone()
                    continue
                check_answer(f"the answer to '{name}'", key, value, total[key], method.raw_answers)
                total[key] = torch.cat([total[key], value]) if method.raw_answers else total[key] + value
        model = model.clone()
        final = self._final(name, model)
        before = anatomy(final.network)
        with one_thread(self.device):  # two could change the last bit of what is trained here
            s.method.finish(name, total, final)
        check_anatomy(s.method.theirs or "finish()", final.network, before)
        down = 4 * self.layout.count(Policy.SHARED) * len(jobs)
        return model, {"exchange": name, "bytes_up": size, "bytes_down": down, **final.report}

    def _final(self, name: str, model: Tensor) -> Final:
        """The global model in the server's hands."""
        network = self.world.network().to(self.device).eval()
        self.layout.bind(network, model)
        rng = generator(self.world.settings.seed, f"finish/{name}")
        return Final(self.layout.named(model), network, len(self.world.dataset.classes), rng)
