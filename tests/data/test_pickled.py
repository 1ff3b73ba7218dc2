"""The pickles CIFAR is published as: read as Python reads them, and nothing in a file is ever run."""

from __future__ import annotations

import os
import pickle
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isofed.data.sources import pickled
from isofed.errors import UserError


def python2(value: Any, fortran: bool = False) -> bytes:
    """A pickle as Python 2's cPickle wrote it with protocol 2: texts as byte strings, the memo counted from 1."""
    memo = 0

    def put(code: bytes) -> bytes:
        nonlocal memo
        memo += 1
        return code + (b"q" + bytes([memo]) if memo < 256 else b"r" + struct.pack("<I", memo))

    def batches(items: list[bytes], one: bytes, many: bytes) -> bytes:
        out = b""
        for start in range(0, len(items), 1000):
            some = items[start : start + 1000]
            out += some[0] + one if len(some) == 1 else b"(" + b"".join(some) + many
        return out

    def string(text: bytes, keep: bool = True) -> bytes:
        code = b"U" + bytes([len(text)]) + text if len(text) < 256 else b"T" + struct.pack("<i", len(text)) + text
        return put(code) if keep else code

    def write(v: Any) -> bytes:
        if isinstance(v, bool):
            return b"\x88" if v else b"\x89"
        if isinstance(v, int):
            if 0 <= v < 256:
                return b"K" + bytes([v])
            return b"M" + struct.pack("<H", v) if 0 <= v < 65536 else b"J" + struct.pack("<i", v)
        if isinstance(v, str):
            return string(v.encode())
        if isinstance(v, list):
            return put(b"]") + batches([write(i) for i in v], b"a", b"e")
        if isinstance(v, dict):
            return put(b"}") + batches([write(k) + write(i) for k, i in v.items()], b"s", b"u")
        assert isinstance(v, np.ndarray) and v.dtype == np.uint8 and v.ndim == 2
        out = put(b"cnumpy.core.multiarray\n_reconstruct\n") + put(b"cnumpy\nndarray\n")
        out += put(put(put(b"K\x00\x85") + string(b"b") + b"\x87") + b"R")
        out += put(b"(K\x01" + write(v.shape[0]) + write(v.shape[1]) + b"\x86") + put(b"cnumpy\ndtype\n")
        out += put(put(string(b"u1") + b"K\x00K\x01\x87") + b"R")
        out += put(b"(K\x03" + string(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00t") + b"b"
        raw = v.tobytes("F" if fortran else "C")
        return out + put((b"\x88" if fortran else b"\x89") + string(raw, keep=False) + b"t") + b"b"

    return b"\x80\x02" + write(value) + b"."


def saved(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "batch"
    path.write_bytes(content)
    return path


def sample() -> dict[str, Any]:
    pixels = np.random.default_rng(0).integers(0, 256, (7, 3072), np.uint8)
    labels = [3, 255, 256, 65535, 65536, -1, 2**31 - 1]
    return {"data": pixels, "labels": labels, "names": [f"n{i}" for i in range(2345)], "one": ["x"], "none": []}


def plain(found: dict[str, Any]) -> dict[str, Any]:
    """With texts as texts, whichever Python wrote them."""
    lists = {k: [pickled.text(i) if isinstance(i, bytes) else i for i in v] for k, v in found.items() if k != "data"}
    return lists | {"data": found["data"]}


@pytest.mark.parametrize("fortran", [False, True])
def test_what_python_2_wrote_is_read_as_pickle_reads_it(tmp_path: Path, fortran: bool) -> None:
    content = python2(sample(), fortran)
    theirs = pickle.loads(content, encoding="latin1")  # shows that the writer above writes real pickles
    found = plain(pickled.read(saved(tmp_path, content)))
    for want in (sample(), theirs):
        assert set(found) == set(want)
        assert np.array_equal(found.pop("data"), want.pop("data")) and found == want
        found = plain(pickled.read(tmp_path / "batch"))


def test_the_names_of_cifar10_are_read_as_python_2_wrote_them(tmp_path: Path) -> None:
    names = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    content = python2({"num_cases_per_batch": 10000, "label_names": names, "num_vis": 3072})
    assert content.startswith(
        b"\x80\x02}q\x01(U\x13num_cases_per_batchq\x02M\x10'U\x0blabel_namesq\x03]q\x04(U\x08airplaneq\x05"
    )
    assert pickled.read(saved(tmp_path, content))["label_names"] == [n.encode() for n in names]


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize("order", ["C", "F"])
def test_what_python_3_writes_is_read(tmp_path: Path, protocol: int, order: Any) -> None:
    given = sample() | {"flag": [True, False, None, (1, 2), (1, 2, 3, 4), (), (9,)], "big": [2**70, -(2**70)]}
    given["data"] = np.asarray(given["data"], order=order)
    given["again"] = [given["one"], given["one"]]
    found = pickled.read(saved(tmp_path, pickle.dumps(given, protocol=protocol)))
    assert np.array_equal(found.pop("data"), given.pop("data")) and found == given


def test_an_array_kept_twice_is_the_same_array(tmp_path: Path) -> None:
    array = np.arange(6, dtype=np.uint8).reshape(2, 3)
    found = pickled.read(saved(tmp_path, pickle.dumps({"a": array, "b": array}, protocol=2)))
    assert found["a"] is found["b"] and found["b"].tolist() == array.tolist()


class Hostile:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_code_in_a_pickle_is_not_run(tmp_path: Path, protocol: int) -> None:
    proof = tmp_path / "proof"
    for function, argument in ((os.system, f"touch {proof}"), (os.mkdir, str(proof)), (exec, f"open({str(proof)!r})")):
        for given in (Hostile(function, argument), {"data": Hostile(function, argument), "labels": [1]}):
            path = saved(tmp_path, pickle.dumps(given, protocol=protocol))
            with pytest.raises(UserError, match="nothing in it was run") as error:
                pickled.read(path)
            assert str(path) in str(error.value) and "\n" not in str(error.value)
            assert not proof.exists()
    path.write_bytes(pickle.dumps(Hostile(os.mkdir, str(proof)), protocol=protocol))
    pickle.loads(path.read_bytes())
    assert proof.exists(), "the same file does harm when it is unpickled"


HARMFUL = {
    "names of numpy that are not for data": b"cnumpy\nload\n(U\x01xtR.",
    "an old class": b"(ios\nsystem\n.",
    "an object": b"(cos\nsystem\nU\x01xo.",
    "a class made new": b"cos\nsystem\n)\x81.",
    "a call of something in the file": b"U\x01x)R.",
    "a call with a list": b"cnumpy\ndtype\n]R.",
    "another type": b"cnumpy\ndtype\nU\x02O8\x85R.",
    "an array of something else": b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\ndtype\n\x85R.",
    "a state for a dictionary": b"}}b.",
    "a state for a name": b"cnumpy\nndarray\n}b.",
    "an extension": b"\x82\x01.",
    "a persistent id": b"U\x01xQ.",
    "a name by way of numbers": b"K\x01K\x02\x93.",
    "another encoding": b"c_codecs\nencode\nX\x01\x00\x00\x00xX\x05\x00\x00\x00rot13\x86R.",
}


@pytest.mark.parametrize("content", HARMFUL.values(), ids=HARMFUL)
def test_everything_but_data_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(UserError, match="batch' (asks for|holds an object|is not a pickle isofed reads).*was run"):
        pickled.read(saved(tmp_path, b"\x80\x02" + content))


DAMAGED = {
    "empty": b"",
    "only a head": b"\x80\x02",
    "a text that claims two billion bytes": b"\x80\x02}U\x01aT\xff\xff\xff\x7fabcs.",
    "a text that claims less than nothing": b"\x80\x02T\xff\xff\xff\xffabc.",
    "nothing on the stack": b"\x80\x02.",
    "two things on the stack": b"\x80\x02}}.",
    "an open mark": b"\x80\x02(}.",
    "no mark": b"\x80\x02]e.",
    "too few for a tuple": b"\x80\x02K\x01\x87.",
    "a memo that is not there": b"\x80\x02h\x05.",
    "a key without a value": b"\x80\x02}(K\x01u.",
    "a list for a key": b"\x80\x02}]K\x01s.",
    "a tuple for a key": b"\x80\x02})K\x01s.",
    "items for a number": b"\x80\x02K\x01K\x01a.",
    "half a name": b"\x80\x02cnumpy",
    "a name that is no text": b"\x80\x02c\xff\nx\n.",
    "a text that is no UTF-8": b"\x80\x02X\x01\x00\x00\x00\xff.",
    "no dictionary": b"\x80\x02].",
    "nothing to remember": b"\x80\x02q\x01.",
    "not a pickle": b"<html>404 not found</html>",
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    sentence = "is not a complete pickle|ends too early|holds no dictionary|is not a pickle"
    with pytest.raises(UserError, match=f"batch' ({sentence})"):
        pickled.read(saved(tmp_path, content))


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    for content in (python2(sample())[:500], *(pickle.dumps({"a": [1], "b": "c"}, p) for p in (2, 4))):
        for end in range(len(content) - 1):
            with pytest.raises(UserError):
                pickled.read(saved(tmp_path, content[:end]))


def test_an_array_must_have_the_bytes_it_claims(tmp_path: Path) -> None:
    content = python2({"data": np.zeros((2, 300), np.uint8)})
    shape = b"K\x02M\x2c\x01\x86"
    assert content.count(shape) == 1
    wrong = {
        b"M\xff\xffM\xff\xff\x86": r"says it is \[65535, 65535\] but has 600 bytes: they must match",
        b"J\xff\xff\xff\x7fJ\xff\xff\xff\x7f\x86": r"but has 600 bytes",
        b"J\xfe\xff\xff\xffJ\xd4\xfe\xff\xff\x86": "must be of uint8 and not empty",  # -2 x -300
        b"K\x00M\x2c\x01\x86": "must be of uint8 and not empty",
        b"\x88M\x58\x02\x86": "must be of uint8 and not empty",  # True x 600
        b")": "must be of uint8 and not empty",
        b"(" + b"K\x01" * 99 + b"M\x58\x02t": "must be of uint8 and not empty",
    }
    for other, message in wrong.items():
        with pytest.raises(UserError, match=message):
            pickled.read(saved(tmp_path, content.replace(shape, other)))
    floats = pickle.dumps({"data": np.zeros((2, 3), np.float32)}, protocol=2)
    with pytest.raises(UserError, match="its arrays must be of uint8"):
        pickled.read(saved(tmp_path, floats))


def test_a_small_file_cannot_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = b"X" + struct.pack("<I", 1000) + b"a" * 1000 + b"q\x01X\x06\x00\x00\x00latin1q\x02"
    again = b"c_codecs\nencode\nh\x01h\x02\x86R"
    with pytest.raises(UserError, match="holds an object isofed does not read"):
        pickled.read(saved(tmp_path, b"\x80\x02" + text + again * 1000 + b"."))
    # Tuples in tuples, each twice: quick to make, for ever to hash or to compare.
    nested = b"\x80\x02)" + b"q\x01h\x01\x86" * 200
    with pytest.raises(UserError, match="is not a complete pickle"):
        pickled.read(saved(tmp_path, nested + b"q\x01}h\x01K\x01s."))
    assert "a" in pickled.read(saved(tmp_path, b"\x80\x02}U\x01a" + nested[2:] + b"s."))
    monkeypatch.setattr(pickled, "MOST_STEPS", 1000)
    with pytest.raises(UserError, match="takes more than 1,000 steps to read"):
        pickled.read(saved(tmp_path, b"\x80\x02" + b"]" * 2000 + b"."))
    monkeypatch.setattr(pickled, "MOST_BYTES", 1000)
    with pytest.raises(UserError, match="has 2,003 bytes: isofed reads at most 1,000"):
        pickled.read(saved(tmp_path, b"\x80\x02" + b"]" * 2000 + b"."))


def test_random_changes_never_do_more_than_refuse(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    content = pickle.dumps({"data": np.zeros((1, 8), np.uint8), "labels": [1, 2], "n": ["x"]}, protocol=2)
    for _ in range(2000):
        changed = bytearray(content)
        for place in rng.integers(0, len(content), rng.integers(1, 4)):
            changed[place] = rng.integers(0, 256)
        said = ""
        try:
            pickled.read(saved(tmp_path, bytes(changed)))
        except UserError as error:
            said = str(error)
        assert "\n" not in said and len(said) < 400 + len(str(tmp_path))


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=re.escape(f"'{tmp_path}/none' cannot be read (No such file or directory)")):
        pickled.read(tmp_path / "none")
