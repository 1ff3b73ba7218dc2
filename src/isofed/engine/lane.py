"""A queue of work for a device: a stream of a GPU.

For a processor there is one that does everything at once, so that whatever is built on lanes can be tried without a
GPU: the order of the work, who waits for whom, what happens when something fails.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

OutOfMemory = torch.OutOfMemoryError
_STARVED = ("out of memory", "ALLOC_FAILED", "unable to find an engine", "NOT_ENOUGH_WORKSPACE")


def starved(error: BaseException) -> bool:
    """Whether something failed for want of memory: libraries have names of their own for that."""
    text = str(error)
    return isinstance(error, OutOfMemory) or (isinstance(error, RuntimeError) and any(s in text for s in _STARVED))


def numbered(device: torch.device) -> torch.device:
    """The same device by its number: PyTorch takes its time to find out which GPU is the present one."""
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())


class Lane:
    """Work in this queue is done in order, and beside that of other lanes."""

    def __init__(self, device: torch.device) -> None:
        self.device = numbered(device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pool = self._new_pool()
        self.records = self._stream is not None  # or does recorded work anew each time

    @contextmanager
    def use(self) -> Iterator[None]:
        """Queue what is done in this block here."""
        if self._stream is None:
            yield
            return
        # torch.cuda.stream would ask for the present device twice, which takes longer than all of the rest.
        before = torch.cuda.current_stream(self.device)
        torch.cuda.set_stream(self._stream)
        try:
            yield
        finally:
            torch.cuda.set_stream(before)

    def follow(self, *tensors: Tensor) -> None:
        """Let the work to come wait for what is queued outside so far, and keep tensors of there until it is done."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            hold(self._stream, *tensors)

    def lead(self) -> None:
        """Let the work outside wait for what is queued here so far."""
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def wait(self) -> None:
        """Wait for all of it."""
        if self._stream is not None:
            self._stream.synchronize()

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Capture work without doing it; calling the result does it. All that is recorded here shares its memory."""
        if self._stream is None:
            return work
        graph = torch.cuda.CUDAGraph()
        collecting = gc.isenabled()
        gc.disable()  # a graph or an event that is freed during a capture would break it
        try:
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                self._abandon(graph)
                raise
            graph.capture_end()
        finally:
            if collecting:
                gc.enable()
        return graph.replay

    def forget(self) -> None:
        """Whoever held recordings has dropped them."""
        self.wait()  # they may still have been running
        self._pool = self._new_pool()

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        try:
            graph.capture_end()
        except RuntimeError:  # a broken capture cannot end well, but it must end
            torch.cuda.synchronize(self.device)
            # PyTorch throws before it lets go of the pool, and would then give no memory back any more.
            index = self.device.index
            with suppress(RuntimeError, AttributeError):
                torch._C._cuda_endAllocateToPool(index, self._pool)
                torch._C._cuda_releasePool(index, self._pool)
            # And before its generator leaves capture mode, in which it would draw no number any more: a copy is not.
            with suppress(RuntimeError):
                generator = torch.cuda.default_generators[index]
                generator.graphsafe_set_state(generator.clone_state())
            self._pool = self._new_pool()

    def _new_pool(self) -> Any:
        return None if self._stream is None else torch.cuda.graph_pool_handle()


class Mark:
    """A place in the queue of the present lane."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(device))

    def passed(self) -> bool:
        """Whether all work before it is done."""
        return self._event is None or self._event.query()


def hold(stream: torch.cuda.Stream, *tensors: Tensor) -> None:
    """Do not let the memory of tensors go to others before a stream has done what it has queued."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(stream)


def synchronize(device: torch.device) -> None:
    """Wait for all lanes."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def give_back_memory(device: torch.device, garbage: bool = True) -> None:
    """Let the device have the memory that nothing uses, also that of replicas, which refer to themselves."""
    if garbage:
        gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def free_memory(device: torch.device) -> int:
    """Bytes that could still be used."""
    if device.type != "cuda":
        return 2**62
    torch.cuda.synchronize(device)
    return torch.cuda.mem_get_info(device)[0]


def generators(device: torch.device) -> list[torch.Generator]:
    """The generators from which work on a device may draw by itself."""
    if device.type != "cuda":
        return [torch.default_generator]
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[index]]
