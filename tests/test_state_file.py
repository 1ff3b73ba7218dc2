"""Records of states in a file: the same bytes whoever writes them, and none taken for what it is not."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import resource
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._utils import _flatten_dense_tensors

from isofed import state_file
from isofed.files import Tensors, raw
from isofed.functional import native
from isofed.state_file import Places, get, length_of, put
from tests.store.tools import in_python, same, vector

# A system that takes a few bytes of each call, and breaks off some of them.
TAKING = """
#define _GNU_SOURCE
#include <errno.h>
#include <sys/uio.h>
#include <unistd.h>

static ssize_t taken(int file, const struct iovec *pieces, int count, off_t offset)
{
    static size_t calls;
    struct iovec some[1000];
    size_t left = ++calls * 37 % 300 + 1;
    int n = 0;
    if (calls % 5 == 0) return errno = EINTR, -1;
    for (; n < count && left; n++) {
        some[n] = pieces[n];
        if (some[n].iov_len > left) some[n].iov_len = left;
        left -= some[n].iov_len;
    }
    return pwritev(file, some, n, offset);
}
#define pwritev taken
"""

# A system that notes what it is told.
TOLD = """
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <sys/uio.h>

int64_t isofed_told[300], isofed_calls;

static int note(int64_t what, int64_t start, int64_t length)
{
    int64_t *here = isofed_told + 3 * isofed_calls++;
    return here[0] = what, here[1] = start, here[2] = length, 0;
}
#define sync_file_range(file, start, length, how) note(how, start, length)
#define posix_fadvise(file, start, length, advice) note(-advice, start, length)
"""

compiled = pytest.param("c", marks=pytest.mark.skipif(native.compiled_by() == "none", reason="there is no C compiler"))


@pytest.fixture(params=[compiled, "python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "python":
        in_python(monkeypatch)
    else:
        assert state_file._functions() is not None
    return str(request.param)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    number = os.open(tmp_path / "states", os.O_RDWR | os.O_CREAT)
    yield number
    os.close(number)


def table(states: list[Tensors], apart: dict[int, int]) -> Places:
    """Places one behind the other, with so many bytes of nobody's before some."""
    rows, end = [], 0
    for number, state in enumerate(states):
        end += apart.get(number, 0)
        room = -(-length_of(state) // 4096) * 4096
        rows.append([end, room, length_of(state), -1])
        end += room
    return np.array(rows, np.int64)


def by_hand(state: Tensors) -> bytes:
    """The record of a state: what its tensors are, and their numbers, each from a multiple of 64 bytes on."""
    about = json.dumps([[k, str(v.dtype).removeprefix("torch."), list(v.shape)] for k, v in state.items()]).encode()
    parts = [len(about).to_bytes(8, "little") + about, *(bytes(raw(v)) for v in state.values())]
    return b"".join(part.ljust(-(-len(part) // 64) * 64, b"\0") for part in parts)


def some_states() -> list[Tensors]:
    torch.manual_seed(0)
    sizes = [0, 1, 3, 15, 16, 17, 255, 1023, 1024, 20_000, 300_000]
    plain = [{"v": torch.randn(size)} for size in sizes]
    others: list[Tensors] = [
        {"a": torch.randint(0, 255, (n,), dtype=torch.uint8), "b": torch.randn(3).bfloat16()} for n in range(1, 20)
    ]
    odd: list[Tensors] = [
        {"picture": torch.randn(2, 3, 5, 4).to(memory_format=torch.channels_last), "none": torch.zeros(0, 3)},
        {"conjugate": torch.tensor([1 + 2j, 3 - 1j]).conj(), "part": torch.tensor([1 + 2j, 5j]).conj().imag},
        {"trained": torch.randn(70, requires_grad=True), "spread": torch.ones(1, 5).expand(9, 5)},
        {str(n): torch.full((n % 5,), float(n)) for n in range(1500)},  # more than a call to the system takes
    ]
    return [*plain, *others, *odd]


@pytest.mark.parametrize("most", [1 << 20, 5000, 64, 7])
def test_records_are_what_they_should_be(most: int, way: str, file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_file, "CALL", most)
    states = some_states()
    places = table(states, {4: 4096, 12: 100_000})
    sums = put(file, places, states)
    for (offset, _, length, _), checksum, state in zip(places.tolist(), sums, states, strict=True):
        wanted = by_hand(state)
        assert length == len(wanted) == length_of(state)
        assert os.pread(file, length, offset) == wanted
        assert checksum == zlib.crc32(wanted)
        found = get(file, offset, length, checksum)
        assert found is not None and same(found, state)


def test_nothing_else_is_written(way: str, file: int) -> None:
    """Between neighbours there are zeros; what belongs to another slot stays."""
    states = [vector(*range(n, n + 2000)) for n in range(6)]
    places = table(states, {})
    os.pwrite(file, b"\xff" * int(places[-1, 0] + 20_000), 0)
    put(file, places[[0, 1, 4]], [states[0], states[1], states[4]])
    data = os.pread(file, 1 << 20, 0)
    starts, ends = places[:, 0].tolist(), (places[:, 0] + places[:, 2]).tolist()
    assert data[ends[0] : starts[1]] == bytes(starts[1] - ends[0])
    assert data[ends[1] : starts[4]] == b"\xff" * (starts[4] - ends[1])
    assert data[ends[4] :] == b"\xff" * (len(data) - ends[4])


def test_neighbours_that_are_far_apart_have_no_zeros_between_them(way: str, file: int) -> None:
    states = [vector(1, 2), vector(3, 4)]
    room = 1 << 20
    places = np.array([[n * room, room, length_of(state), -1] for n, state in enumerate(states)])
    os.pwrite(file, b"\xff" * room, 0)
    put(file, places, states)
    end = length_of(states[0])
    assert os.pread(file, room - end, end) == b"\xff" * (room - end)
    assert os.pread(file, length_of(states[1]), room) == by_hand(states[1])


def test_a_full_device_is_an_error(way: str) -> None:
    with open("/dev/full", "wb", buffering=0) as full, pytest.raises(OSError) as error:
        put(full.fileno(), table([vector(1)], {}), [vector(1)])
    assert error.value.errno == errno.ENOSPC and error.value.strerror


def test_what_is_written_in_part_goes_on_where_it_stopped(way: str, file: int) -> None:
    """A limit on the size of files lets the system take a part of a call, and refuse the rest."""
    states = [vector(*range(n, n + 3000)) for n in range(4)]
    places = table(states, {})
    limit, before = int(places[2, 0]) + 5001, resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(OSError) as error:
            put(file, places, states)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert error.value.errno == errno.EFBIG
    assert os.fstat(file).st_size == limit
    for n in (0, 1):
        assert os.pread(file, int(places[n, 2]), int(places[n, 0])) == by_hand(states[n])


def with_system(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The functions in C, on such a system."""
    source = folder / "system.c"
    source.write_text(f'{text}\n#include "{Path(state_file.__file__).with_suffix(".c")}"\n')
    known, functions = state_file._functions(), native.library(source)
    assert functions is not None
    functions.isofed_put.argtypes = known.isofed_put.argtypes
    monkeypatch.setattr(state_file, "_functions", lambda: functions)
    return functions


@pytest.mark.skipif(native.compiled_by() == "none", reason="there is no C compiler")
@pytest.mark.parametrize("flags", [[], ["-mno-pclmul"]], ids=["as it is", "without carry-less products"])
def test_checksums_are_those_of_zlib(flags: list[str], tmp_path: Path) -> None:
    """Of every length up to some hundreds, from any place on, and going on from any sum before."""
    if flags and platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("only these processors have them")
    source = tmp_path / "sums.c"
    source.write_text(
        f'#include "{Path(state_file.__file__).with_suffix(".c")}"\n'
        "uint32_t isofed_sum(uint32_t sum, const unsigned char *at, int64_t size) { return checksum(sum, at, size); }\n"
    )
    functions = native.library(source, *flags)
    assert functions is not None
    ours = functions.isofed_sum
    ours.argtypes, ours.restype = [ctypes.c_uint32, ctypes.c_void_p, ctypes.c_int64], ctypes.c_uint32
    data = np.random.default_rng(0).integers(0, 256, 100_000, np.uint8)
    data[2000:3000], data[3000:4000] = 0, 255
    for size in [*range(330), 1000, 1024, 65_537, 99_000]:
        for start, before in ((0, 0), (1, 0xFFFFFFFF), (size % 64, 0x12345678), (2500, 1), (3500, 0)):
            some = data[start : start + size]
            assert ours(before, some.ctypes.data, len(some)) == zlib.crc32(some.tobytes(), before)


@pytest.mark.skipif(native.compiled_by() == "none", reason="there is no C compiler")
def test_calls_that_take_a_few_bytes(file: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may take less of a call than it is given, wherever a piece ends."""
    with_system(TAKING, tmp_path, monkeypatch)
    states = some_states()[:14]
    places = table(states, {4: 4096})
    sums = put(file, places, states)
    for (offset, _, length, _), checksum, state in zip(places.tolist(), sums, states, strict=True):
        assert os.pread(file, length, offset) == by_hand(state)
        assert checksum == zlib.crc32(by_hand(state))


@pytest.mark.skipif(native.compiled_by() == "none", reason="there is no C compiler")
@pytest.mark.parametrize("most", [1 << 20, 5000])
def test_what_c_tells_the_system(most: int, file: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """First what it may forget, and of all that is written, and nothing else, that it may go to the disk."""
    monkeypatch.setattr(state_file, "CALL", most)
    functions = with_system(TOLD, tmp_path, monkeypatch)
    calls = ctypes.c_int64.in_dll(functions, "isofed_calls")
    calls.value = 0
    states = [vector(*range(2000)) for _ in range(9)]
    places = table(states, {})
    room, length = places[0, 1:3].tolist()
    put(file, places[[1, 2, 6]], [states[n] for n in (1, 2, 6)], places[[8, 3, 4]])
    numbers = list((ctypes.c_int64 * 300).in_dll(functions, "isofed_told"))
    told = [tuple(numbers[3 * n : 3 * n + 3]) for n in range(calls.value)]
    assert told[:2] == [(-os.POSIX_FADV_DONTNEED, 3 * room, 2 * room), (-os.POSIX_FADV_DONTNEED, 8 * room, room)]
    begins = 2  # SYNC_FILE_RANGE_WRITE
    assert {what for what, _, _ in told[2:]} == {begins}
    written = sorted(byte for _, start, size in told[2:] for byte in range(start, start + size))
    assert written == [*range(room, 2 * room + length), *range(6 * room, 6 * room + length)]


def test_without_c_the_system_is_told_the_same_way(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """That nobody will read what was just written: so Linux begins to bring it to the disk."""
    in_python(monkeypatch)
    told: list[tuple[int, ...]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _, *given: told.append(given))
    states = [vector(*range(2000)) for _ in range(9)]
    places = table(states, {})
    room = int(places[0, 1])
    put(file, places[[1, 2, 6]], [states[n] for n in (1, 2, 6)], places[[4]])
    assert told == [(n * room, k * room, os.POSIX_FADV_DONTNEED) for n, k in ((4, 1), (1, 2), (6, 1))]


def test_only_these_places_are_forgotten(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies between would have to be read from the disk again."""
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda file, start, length, _: told.append((start, start + length)))
    places = table([vector(*range(2000)) for _ in range(9)], {})
    room = int(places[0, 1])
    state_file.forget(file, places[[1, 2, 3, 6, 8]])
    assert told == [(room, 4 * room), (6 * room, 7 * room), (8 * room, 9 * room)]


@pytest.mark.parametrize("what", ["flipped", "cut", "beyond", "another record", "no record"])
def test_what_is_not_the_record_is_none(what: str, way: str, file: int) -> None:
    states = [vector(1, 2, 3), vector(4, 5, 6)]
    places = table(states, {})
    sums, (offset, _, length, _) = put(file, places, states), places[0].tolist()
    if what == "flipped":
        os.pwrite(file, b"\x01", offset + length - 60)
    elif what == "cut":
        os.truncate(file, offset + length - 1)
    elif what == "beyond":
        offset = 1 << 40
    elif what == "another record":
        offset = int(places[1, 0])
    else:
        os.pwrite(file, noise := bytes(range(64)) * (length // 64), offset)
        sums[0] = zlib.crc32(noise)
    assert get(file, offset, length, sums[0]) is None


@pytest.mark.parametrize("room", [True, False])
def test_tensors_come_to_the_host_together(room: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU's states take, on a processor: no bit changes, whatever lies how in memory, and however full it is."""
    together = list[int]()

    def noted(values: list[torch.Tensor]) -> torch.Tensor:
        together.append(len(values))
        if not room:
            raise torch.OutOfMemoryError
        return _flatten_dense_tensors(values)

    monkeypatch.setattr(state_file, "_flatten_dense_tensors", noted)
    values = [
        torch.randn(5),
        torch.arange(7),
        torch.randn(2, 3, 5, 4).to(memory_format=torch.channels_last),
        torch.randn(6, 4).t(),
        torch.randn(300_000),  # large enough for a copy of its own
        torch.tensor(3.0),
        torch.tensor([float("nan"), -0.0, float("inf")], requires_grad=True),
    ]
    found = state_file._copied(values)
    assert [(v.dtype, v.shape) for v in found] == [(v.dtype, v.shape) for v in values]
    assert all(raw(v) == raw(w) for v, w in zip(found, values, strict=True))
    assert together == [5, 1]


def test_memory_that_cannot_be_locked_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where there is no GPU, or where the system has locked as much as it will."""
    empty_like, asked = torch.empty_like, list[bool]()

    def refusing(value: torch.Tensor, pin_memory: bool = False, **given: Any) -> torch.Tensor:
        asked.append(pin_memory)
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return empty_like(value, **given)

    monkeypatch.setattr(torch, "empty_like", refusing)
    values = torch.randn(300)
    assert torch.equal(state_file._coming(values, locked=True), values)
    assert asked == [True, False]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_small_states_of_a_gpu_come_into_locked_memory() -> None:
    values = [torch.randn(5, device="cuda"), torch.arange(7, device="cuda"), torch.randn(300_000, device="cuda")]
    found = state_file._copied(values)
    torch.cuda.synchronize()
    assert [v.is_pinned() for v in found] == [True, True, False]
    assert all(torch.equal(v, w.cpu()) for v, w in zip(found, values, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_states_of_a_gpu_are_written_like_others(way: str, file: int) -> None:
    states: list[dict[str, Any]] = some_states()
    there = [{name: value.cuda() for name, value in state.items()} for state in states]
    places = table(states, {4: 4096})
    busy = torch.randn(4000, 4000, device="cuda")
    for _ in range(20):
        busy = busy @ busy * 1e-4
    there[3]["v"] = busy.flatten()[:15] * 0 + states[3]["v"].cuda()  # comes late, on the current stream
    sums = put(file, places, there)
    for (offset, _, length, _), checksum, state in zip(places.tolist(), sums, states, strict=True):
        assert os.pread(file, length, offset) == by_hand(state)
        assert checksum == zlib.crc32(by_hand(state))
