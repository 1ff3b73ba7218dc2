"""One run of the task of ``peers.py`` in each framework; each is called in a process of its own.

The peers are imported only where they run, so that none of them has to be installed for the others.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from isofed.federation import Federation
from isofed.progress import Watcher
from peer_task import (
    AT_ONCE,
    BATCH,
    COHORT,
    LR,
    USERS,
    Case,
    Clock,
    PlainNetwork,
    judge_plainly,
    pictures,
    plain_network,
    the_world,
    train_plainly,
)


def run_isofed(case: Case, clock: Clock) -> None:
    class Listening(Watcher):
        def round(self, line: dict[str, Any]) -> None:
            clock.round(line.get("accuracy"))

    chosen = the_world(case.data, case.seed, case.device).settings.to_dict()
    chosen |= {"rounds": case.rounds, "precision": case.precision}
    if case.device == "cpu":
        chosen |= {"executor": "workers", "workers": case.processes} if case.processes > 1 else {"executor": "serial"}
    Federation(**chosen).fit(Listening())


def run_loop(case: Case, clock: Clock) -> None:
    """A bare loop over the clients; with several processes, each has its share of them and exchanges nothing."""
    network, rng = plain_network(case), np.random.default_rng(case.seed)
    weights = [p.detach().clone() for p in network.parameters()]
    for number in range(1, case.rounds + 1):
        users = rng.choice(USERS, COHORT, replace=False)[case.rank :: case.processes]
        total = [torch.zeros_like(w) for w in weights]
        for user in users:
            _set(network, weights)
            train_plainly(case, network, int(user))
            torch._foreach_add_(total, [p.detach() for p in network.parameters()])
        weights = [t / len(users) for t in total]
        _set(network, weights)
        clock.round(judge_plainly(case, network) if case.judged(number) and case.rank == 0 else None)


def _set(network: nn.Module, weights: list[Tensor]) -> None:
    with torch.no_grad():
        torch._foreach_copy_(list(network.parameters()), weights)


def run_pfl(case: Case, clock: Clock) -> None:
    if case.device == "cuda" and case.processes > 1:
        # NCCL refuses two processes on one GPU; gloo takes the sum through the host.
        torch.distributed.init_process_group = functools.partial(
            lambda start, backend, **more: start(backend="gloo", **more), torch.distributed.init_process_group
        )
    from pfl.aggregate.simulate import SimulatedBackend  # type: ignore[import-not-found]
    from pfl.aggregate.weighting import WeightByUser  # type: ignore[import-not-found]
    from pfl.algorithm.base import NNAlgorithmParams  # type: ignore[import-not-found]
    from pfl.algorithm.federated_averaging import FederatedAveraging  # type: ignore[import-not-found]
    from pfl.callback.base import TrainingProcessCallback  # type: ignore[import-not-found]
    from pfl.callback.central_evaluation import CentralEvaluationCallback  # type: ignore[import-not-found]
    from pfl.data import FederatedDataset  # type: ignore[import-not-found]
    from pfl.data.dataset import Dataset  # type: ignore[import-not-found]
    from pfl.data.sampling import get_user_sampler  # type: ignore[import-not-found]
    from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams  # type: ignore[import-not-found]
    from pfl.metrics import Metrics, Weighted  # type: ignore[import-not-found]
    from pfl.model.pytorch import PyTorchModel  # type: ignore[import-not-found]

    class WithMetrics(PlainNetwork):
        @torch.no_grad()
        def metrics(self, images: Tensor, labels: Tensor) -> dict[str, Any]:
            self.eval()
            logits = self(images)
            loss = float(cross_entropy(logits, labels, reduction="sum"))
            right = float((logits.argmax(1) == labels).sum())
            return {"loss": Weighted(loss, len(labels)), "accuracy": Weighted(right, len(labels))}

    class Listening(TrainingProcessCallback):
        """Asks for an evaluation after 10, 20, ... rounds, where pfl's own counting would after 11, 21, ..."""

        def __init__(self) -> None:
            parameters = NNEvalHyperParams(local_batch_size=AT_ONCE)
            self.judge = CentralEvaluationCallback(Dataset(list(pictures(case, "test"))), parameters)

        def on_train_begin(self, *, model: Any) -> Any:
            return self.judge.on_train_begin(model=model)

        def after_central_iteration(self, found: Any, model: Any, *, central_iteration: int) -> tuple[bool, Any]:
            number, accuracy = central_iteration + 1, None
            if case.judged(number):
                _, metrics = self.judge.after_central_iteration(found, model, central_iteration=number)
                accuracy = {str(k): v for k, v in metrics}["Central val | accuracy"].overall_value
            clock.round(accuracy)
            return False, Metrics()

    np.random.seed(case.seed)
    torch.manual_seed(1000 * case.seed + case.rank)
    world, (images, labels) = the_world(case.data, case.seed, case.device), pictures(case, "train")
    users = {n: (images[torch.from_numpy(c)], labels[torch.from_numpy(c)]) for n, c in enumerate(world.clients)}
    data = FederatedDataset.from_slices(users, get_user_sampler("random", range(USERS)))
    network = WithMetrics(world.network()).to(case.device)
    model = PyTorchModel(
        model=network,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(network.parameters(), 1.0),
        amp_dtype=torch.bfloat16 if case.precision == "bf16" else None,
    )
    FederatedAveraging().run(
        # Without an evaluation at the users before and after training, which the others do not make either.
        NNAlgorithmParams(case.rounds, evaluation_frequency=10**9, train_cohort_size=COHORT, val_cohort_size=None),
        SimulatedBackend(training_data=data, val_data=data, postprocessors=[WeightByUser()]),
        model,
        NNTrainHyperParams(local_learning_rate=LR, local_num_epochs=1, local_batch_size=BATCH),
        NNEvalHyperParams(local_batch_size=AT_ONCE),
        [Listening()],
    )


@functools.cache
def resident(case: Case) -> PlainNetwork:
    """The network of this process, made once."""
    torch.set_num_threads(case.threads)
    arithmetic(case.precision)
    return plain_network(case)


def run_flower(case: Case, clock: Clock) -> None:
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    client, server = ClientApp(), ServerApp()

    @client.train()
    def train(message: Message, context: Context) -> Message:
        # What is kept between visits must be that of the actor's own modules, not of a copy.
        import peer_frameworks
        import peer_task

        network = peer_frameworks.resident(case)
        received: Any = message.content["arrays"]
        network.load_state_dict(received.to_torch_state_dict())
        user = int(context.node_config["partition-id"])
        peer_task.train_plainly(case, network, user)
        counts: dict[str, Any] = {
            "num-examples": len(peer_task.the_world(case.data, case.seed, case.device).clients[user])
        }
        content: dict[str, Any] = {"arrays": ArrayRecord(network.state_dict()), "metrics": MetricRecord(counts)}
        return Message(content=RecordDict(content), reply_to=message)

    def judge(number: int, arrays: ArrayRecord) -> MetricRecord:
        accuracy = None
        if case.judged(number):
            network = resident(case)
            network.load_state_dict(arrays.to_torch_state_dict())
            torch.set_num_threads(case.processes * case.threads)  # nobody else works at this moment
            accuracy = judge_plainly(case, network)
        if number:
            clock.round(accuracy)
        return MetricRecord()

    @server.main()
    def main(grid: Any, context: Context) -> None:
        random.seed(case.seed)
        strategy = FedAvg(fraction_train=COHORT / USERS, fraction_evaluate=0.0, min_available_nodes=USERS)
        initial = ArrayRecord(plain_network(case).state_dict())
        strategy.start(grid, initial, num_rounds=case.rounds, evaluate_fn=judge)

    gpu = 1 / case.processes if case.device == "cuda" else 0.0
    resources: dict[str, Any] = {"num_cpus": case.threads, "num_gpus": gpu}
    start: dict[str, Any] = {
        "num_cpus": case.processes * case.threads,
        "num_gpus": int(gpu > 0),
        "include_dashboard": False,
    }
    run_simulation(server, client, USERS, backend_config={"client_resources": resources, "init_args": start})


RUN: dict[str, Callable[[Case, Clock], None]] = {
    "isofed": run_isofed,
    "pfl": run_pfl,
    "flower": run_flower,
    "loop": run_loop,
}


def arithmetic(precision: str) -> None:
    fast = precision != "fp32"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = fast
