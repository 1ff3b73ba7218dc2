"""How near a step comes to what the GPU can do, and what memory slots take.

The work of a step is counted, not measured: multiply-accumulates of convolutions and linear layers, forward and twice
that back; and the bytes that must be read and written even if every layer touched each of its inputs, outputs and
weights only as often as it has to (forward: inputs in, outputs out; back: the outputs' gradients and the inputs in,
the inputs' gradients out; the update: weight, gradient and momentum in, weight and momentum out, in fp32). Divided by
the time of a step they are set beside a large matrix product and a large copy on the same GPU.

Memory is measured: the most that PyTorch holds during a round, with more and more slots, and the line through it.

    python benchmarks/limits.py
    python benchmarks/limits.py --networks resnet18 --slots 1,2,4,8 --json limits.json
"""

from __future__ import annotations

import argparse
import gc
from statistics import linear_regression, median
from typing import Any

import torch
from torch import Tensor, nn

import record
from isofed.bench import MODELS, Federated, chosen, spread
from isofed.diagnostics.cost import pass_macs
from isofed.engine.choose import exact_arithmetic
from isofed.engine.world import World
from isofed.models import Network
from isofed.records import environment
from kernels import ceilings

SIZES = {"bf16": 2, "tf32": 4, "fp32": 4}  # bytes of an activation


def step_bytes(network: Network, batch: int, precision: str) -> float:
    """Bytes that a step has to move."""
    assert network.shape is not None
    numbers, hooks = [0.0], []

    def count(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        arriving, leaving = inputs[0].numel(), output.numel()
        numbers[0] += (arriving + leaving) + (leaving + 2 * arriving)

    for layer in network.modules():
        if not list(layer.children()) and any(True for _ in layer.parameters()):
            hooks.append(layer.register_forward_hook(count))
    with torch.no_grad():
        network.eval()(torch.zeros(1, *network.shape))
    for hook in hooks:
        hook.remove()
    weights = sum(p.numel() for p in network.parameters())
    # Weights and their gradients in the precision of the computation, then the update in fp32.
    return SIZES[precision] * (batch * numbers[0] + 3 * weights) + 4 * 5 * weights


def measure(network: str, counts: list[int], o: argparse.Namespace) -> list[dict[str, Any]]:
    """Steps a second and the peak of memory for each number of slots."""
    found = []
    for count in counts:
        common = {"model": network, "precision": o.precision, "batch_size": o.batch, "samples": 2 * o.batch}
        s = chosen(**common, device="cuda", slots=count)
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with exact_arithmetic(s):
            run = Federated(World.create(s), 4 * count)
            rates = [run() for _ in range(o.repeats)]
            run.close()
        peak = torch.cuda.max_memory_allocated() - before
        found.append({"slots": count, "rates": rates, "peak_bytes": peak, "notes": run.notes})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", default=MODELS["cuda"])
    parser.add_argument("--precision", default="bf16", choices=list(SIZES))
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--slots", default="1,2,4,8,16")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=record.file, help="write all numbers here")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU")
    about = environment("cuda", "")
    print(f"{about['device_name']}, torch {about['torch']}, {arguments.precision}, batch {arguments.batch}")
    rates = ceilings()
    counts, cases = [int(n) for n in arguments.slots.split(",")], []
    print(
        f"{'network':14}{'slots':>6}{'steps/s':>26}{'TFLOP/s':>9}{'of peak':>9}{'TB/s':>7}{'of copy':>9}{'peak MB':>9}"
    )
    for network in arguments.networks.split(","):
        made = World.create(chosen(model=network)).network()
        flops = 6 * arguments.batch * pass_macs(made)
        moved = step_bytes(made, arguments.batch, arguments.precision)
        rows = measure(network, counts, arguments)
        for row in rows:
            rate = median(row["rates"])
            print(
                f"{network:14}{row['slots']:>6}{spread(row['rates']):>26}{flops * rate / 1e12:>9.0f}"
                f"{flops * rate / rates['bf16_product_flops']:>9.1%}{moved * rate / 1e12:>7.2f}"
                f"{moved * rate / rates['copy_bytes_per_second']:>9.1%}{row['peak_bytes'] / 1e6:>9.0f}",
                *row["notes"],
                flush=True,
            )
        case: dict[str, Any] = {"network": network, "step_flops": flops, "step_bytes": moved, "slots": rows}
        if len(rows) > 2:
            x, y = [row["slots"] for row in rows], [row["peak_bytes"] / 1e6 for row in rows]
            each, constant = linear_regression(x, y)
            off = max(abs(constant + each * a - b) / b for a, b in zip(x, y, strict=True))
            case |= {"constant_megabytes": constant, "slot_megabytes": each, "largest_deviation": off}
            print(f"{network:14}memory: {constant:.0f} MB + {each:.1f} MB a slot, to {off:.1%}")
        cases.append(case)
    print(f"median (range) of {arguments.repeats} repeats")
    record.write(arguments, "cuda", ceilings=rates, cases=cases)


if __name__ == "__main__":
    main()
