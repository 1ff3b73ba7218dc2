"""Single files of a run: written whole or not at all, read only when nothing in them is damaged."""

from __future__ import annotations

import errno
import math
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch

from isofed.errors import RunError
from isofed.files import write_error
from isofed.records import DamagedFile, load_tensors, save_tensors, write_atomic
from tests.records.tools import flip, one_sentence, state

# --- writing one file


def test_write_atomic_writes_replaces_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "file"
    write_atomic(path, b"old")
    write_atomic(path, b"new and longer")
    assert path.read_bytes() == b"new and longer"
    assert os.listdir(tmp_path) == ["file"]
    mask = os.umask(0)
    os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask


def test_a_reader_sees_the_old_file_or_the_new_one(tmp_path):
    path = tmp_path / "file"
    contents = [bytes([number]) * 200_000 for number in range(30)]
    write_atomic(path, contents[0])

    def write() -> None:
        for content in contents:
            write_atomic(path, content)

    writer = threading.Thread(target=write)
    writer.start()
    seen = []
    while writer.is_alive():
        seen.append(path.read_bytes())
    writer.join()
    assert seen
    assert all(content in contents for content in seen)
    assert path.read_bytes() == contents[-1]


def test_write_atomic_under_a_file_or_onto_a_folder(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunError, match="nothing already written is lost") as error:
        write_atomic(tmp_path / "file" / "below", b"data")
    assert "Not a directory" in one_sentence(error)
    (tmp_path / "folder").mkdir()
    with pytest.raises(RunError):
        write_atomic(tmp_path / "folder", b"data")
    with pytest.raises(RunError):
        write_atomic(tmp_path / "nowhere" / "file", b"data")
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_the_sentence_for_a_full_disk():
    with pytest.raises(OSError) as refused, open("/dev/full", "wb", buffering=0) as file:
        file.write(b"data")
    assert refused.value.errno == errno.ENOSPC
    text = str(write_error(Path("run/model"), refused.value))
    assert text == "cannot write run/model: the disk or the quota is full; nothing already written is lost"


# --- tensor files


def test_tensors_and_info_come_back(tmp_path):
    base = torch.arange(48.0).reshape(2, 3, 2, 4)
    tensors = {
        "plain": base,
        "tied": base,
        "row": base[1],
        "transposed": torch.arange(6).reshape(2, 3).t(),
        "strided": torch.arange(10)[::3],
        "one of a stride": torch.arange(10)[::3][:1],
        "none of a stride": torch.from_numpy(np.zeros((0, 4), np.int64)),
        "channels_last": base.to(memory_format=torch.channels_last),
        "expanded": torch.ones(1).expand(5),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "half": torch.tensor([1.5, -2], dtype=torch.bfloat16),
        "flags": torch.tensor([True, False]),
        "bytes": torch.tensor([0, 255], dtype=torch.uint8),
        "imaginary": torch.tensor([1 + 2j]).conj(),
        "parameter": torch.nn.Parameter(torch.tensor([math.nan, math.inf, -0.0])),
        "näme/with \"odd' characters\n": torch.ones(1),
    }
    info = {"round": 3, "best": math.inf, "list": [1, 2.5, None, "ü"], "nested": {"b": 0.1, "a": True}}
    save_tensors(tmp_path / "file", tensors, info)
    loaded, told = load_tensors(tmp_path / "file")
    assert told == info
    assert list(loaded) == sorted(tensors)
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].is_contiguous()
        assert torch.equal(loaded[name].nan_to_num(9), tensor.detach().nan_to_num(9))
        assert loaded[name].data_ptr() % 64 == 0
    loaded["plain"].zero_()
    assert torch.equal(loaded["tied"], base)
    assert torch.equal(load_tensors(tmp_path / "file")[0]["plain"], base)


def test_no_tensors_and_numbers_from_elsewhere_in_info(tmp_path):
    info: dict[Any, Any] = {"a": np.float32(0.5), "b": torch.tensor([1, 2]), "c": (3,), 4: np.int64(5)}
    save_tensors(tmp_path / "file", {}, info)
    assert load_tensors(tmp_path / "file") == ({}, {"a": 0.5, "b": [1, 2], "c": [3], "4": 5})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_tensors_from_a_gpu(tmp_path):
    save_tensors(tmp_path / "gpu", {"a": torch.arange(6.0, device="cuda").reshape(2, 3).t()}, {})
    save_tensors(tmp_path / "cpu", {"a": torch.arange(6.0).reshape(2, 3).t()}, {})
    assert (tmp_path / "gpu").read_bytes() == (tmp_path / "cpu").read_bytes()


def test_the_bytes_depend_on_the_content_alone(tmp_path):
    image = torch.arange(48.0).reshape(2, 3, 2, 4)
    save_tensors(tmp_path / "a", {"x": image, "y": torch.ones(2)}, {"p": 1, "q": 2})
    save_tensors(
        tmp_path / "b", {"y": torch.ones(2), "x": image.to(memory_format=torch.channels_last)}, {"q": 2, "p": 1}
    )
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    save_tensors(tmp_path / "c", {"x": image, "y": torch.ones(2)}, {"p": 1, "q": 3})
    assert (tmp_path / "a").read_bytes() != (tmp_path / "c").read_bytes()


def test_other_programs_can_read_a_tensor_file(tmp_path):
    save_tensors(tmp_path / "file", state(4), {"round": 4})
    with safetensors.safe_open(str(tmp_path / "file"), framework="np") as file:
        assert (file.get_tensor("weight") == 4).all()
        assert list(file.metadata()) == ["isofed"]


def test_every_truncation_is_found(tmp_path):
    path = tmp_path / "file"
    save_tensors(path, state(3, size=16), {"round": 3})
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(DamagedFile) as error:
            load_tensors(path)
        assert "damaged" in one_sentence(error)
    path.write_bytes(whole + b"more")
    with pytest.raises(DamagedFile):
        load_tensors(path)
    path.write_bytes(whole)
    assert load_tensors(path)[1] == {"round": 3}


def test_a_flipped_bit_is_found_wherever_it_is(tmp_path):
    path = tmp_path / "file"
    save_tensors(path, state(3, size=16), {"round": 3, "best": 0.25})
    whole = path.read_bytes()
    for at in range(len(whole)):
        flip(path, at, 1 << (at % 8))
        with pytest.raises(DamagedFile):
            load_tensors(path)
        path.write_bytes(whole)
    assert load_tensors(path)[1]["round"] == 3


def test_files_of_another_kind_are_refused_and_never_run(tmp_path):
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "exploded"),)

    torch.save(Bomb(), tmp_path / "pickle")
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "text").write_text("not tensors, but long enough to have a header")
    (tmp_path / "foreign").write_bytes(safetensors.torch.save({"a": torch.ones(2)}))
    (tmp_path / "liar").write_bytes(safetensors.torch.save({"a": torch.ones(2)}, {"isofed": "[1]"}))
    for name in ("pickle", "empty", "text", "foreign", "liar"):
        with pytest.raises(DamagedFile) as error:
            load_tensors(tmp_path / name)
        assert name in one_sentence(error)
    assert not (tmp_path / "exploded").exists()
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(RunError) as missing:
            load_tensors(path)
        assert not isinstance(missing.value, DamagedFile)
        one_sentence(missing)
