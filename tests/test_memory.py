"""The peak memory of a run: what is taken in it counts, what was taken before it does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from isofed.memory import PeakMemory, shortage
from tests.cli_tools import complaint, isofed
from tests.engine.plain import small

MANY = 200_000_000
needs_linux = pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the system does not tell")


def held(size: int) -> None:
    block = bytearray(size)
    del block


@needs_linux
def test_what_was_held_before_does_not_count_and_what_is_given_back_does() -> None:
    cpu = torch.device("cpu")
    PeakMemory(cpu)  # from the second in a process on, the count starts afresh
    held(MANY)
    peak = PeakMemory(cpu)
    before = peak.bytes()
    assert before is not None
    held(MANY)
    after = peak.bytes()
    assert after is not None and after - before == pytest.approx(MANY, rel=0.1)


@needs_linux
def test_processes_that_were_started_count_too() -> None:
    peak = PeakMemory(torch.device("cpu"))
    before = peak.bytes()
    program = f"block = bytearray({MANY}); print(len(block), flush=True); input()"
    words = [sys.executable, "-c", program]
    with subprocess.Popen(words, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        during = peak.bytes()
        child.communicate("\n")
    assert before is not None and during is not None and during > before + MANY


def test_a_run_records_it(tmp_path: Path) -> None:
    result = small(rounds=1, out=tmp_path / "run").fit()
    assert json.loads((tmp_path / "run/result.json").read_text())["peak_memory"] == result.peak_memory
    assert result.peak_memory is None or result.peak_memory > 10_000_000


def test_a_shortage_is_told_in_one_sentence_and_is_nobodys_mistake(tmp_path: Path) -> None:
    text = complaint(isofed("data", "synthetic:samples=100000000000000", cwd=tmp_path), 1)
    assert text.startswith("there is not enough memory (Unable to allocate ")
    with pytest.raises(RuntimeError) as processor:
        torch.empty(10**15)
    one = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    # As CUDA itself says it, with advice for its developers below.
    other = torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in its pages.")
    assert "there is not enough memory ([enforce fail" in str(shortage(processor.value))
    assert "the GPU has no memory left (CUDA out of memory. Tried to allocate 2.00 GiB)" in str(shortage(one))
    assert "the GPU has no memory left (CUDA error: out of memory): nvidia-smi" in str(shortage(other))
    assert shortage(RuntimeError("shapes differ")) is None
