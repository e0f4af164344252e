"""Files of values, against the safetensors library, and damaged ones."""

import json
import os

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from trace_tools import STORED, random_bits, rng

from diptych.lab.traces import DTYPES, Tensor, TraceError
from diptych.lab.traces.tensor_file import read, write
from lab_files import SPECIAL, make

SHAPES = [(), (0,), (3, 0, 2), (1,), (5, 3), (2, 3, 4)]


def some(*key: object) -> dict[str, Tensor]:
    gen = rng(*key)
    names = [(d, s) for d in STORED for s in SHAPES]
    return {
        f"{d} {s}": Tensor(DTYPES[d], random_bits(gen, d, s))
        for d, s in (names[i] for i in gen.permutation(len(names)))
    }


def test_what_is_written_is_read_here_and_by_the_library(tmp_path):
    path, tensors = tmp_path / "x", some()
    write(path, tensors)
    found = read(path)
    theirs = safetensors.torch.load_file(path)
    assert found.keys() == tensors.keys() == theirs.keys()
    for name, (dtype, bits) in tensors.items():
        assert found[name].dtype is dtype and found[name].bits.shape == bits.shape
        np.testing.assert_array_equal(found[name].bits, bits)
        assert found[name].bits.flags.aligned and not found[name].bits.flags.writeable
        assert str(theirs[name].dtype) == f"torch.{dtype.name}" and theirs[name].shape == bits.shape
        assert theirs[name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() == bits.tobytes()


def test_the_librarys_files_are_read(tmp_path):
    path = tmp_path / "x"
    tensors = {"a": torch.randn(3, 5), "b": torch.randn(7).bfloat16(), "c": torch.arange(4), "d": torch.zeros(0, 2)}
    safetensors.torch.save_file(tensors, path, {"by": "them"})
    for name, (_, bits) in read(path).items():
        assert bits.tobytes() == tensors[name].reshape(-1).view(torch.uint8).numpy().tobytes()


def test_a_file_without_tensors(tmp_path):
    write(tmp_path / "x", {})
    assert read(tmp_path / "x") == {}


def test_values_are_not_read_with_the_header(tmp_path):
    """A file of 1 TB, which is a hole, is mapped at once."""
    header = {"x": {"dtype": "F32", "shape": [2**38], "data_offsets": [0, 2**40]}}
    text = json.dumps(header).encode()
    (tmp_path / "x").write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(tmp_path / "x", 8 + len(text) + 2**40)
    assert read(tmp_path / "x")["x"].bits[2**37] == 0


@pytest.mark.parametrize("what", SPECIAL)
def test_what_is_no_file_is_refused(tmp_path, what):
    with pytest.raises(TraceError, match=r"x: cannot be read|x: is a"):
        read(make(tmp_path / "x", what))


def test_a_link_to_a_good_file_is_refused(tmp_path):
    write(tmp_path / "good", some())
    (tmp_path / "x").symlink_to("good")
    with pytest.raises(TraceError, match="x: cannot be read: it is a link"):
        read(tmp_path / "x")


def entry(dtype="F32", shape=(2,), at=(0, 8), **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(at), **more}


@pytest.mark.parametrize(
    ("header", "size", "why"),
    [
        ([], 0, "header: must be an object"),
        ({"a": 3}, 0, "tensor 'a': must be an object"),
        ({"a": entry(more=1)}, 8, "tensor 'a': has an unknown field 'more'"),
        ({"a": {"dtype": "F32"}}, 8, "tensor 'a': lacks data_offsets, shape"),
        ({"a": entry("F7")}, 8, "tensor 'a': dtype: is unknown: 'F7'"),
        ({"a": entry("")}, 8, "tensor 'a': dtype: is unknown: ''"),
        ({"a": entry(shape=[-2])}, 8, "tensor 'a': shape: is impossible"),
        ({"a": entry(shape=[2**62, 4], at=[0, 0])}, 0, "tensor 'a': shape: is impossible"),
        ({"a": entry(shape=[2**61, 2**61, 0], at=[0, 0])}, 0, "tensor 'a': shape: is impossible"),
        ({"a": entry(shape=[2.0])}, 8, r"tensor 'a': shape\[0\]: must be an integer"),
        ({"a": entry(shape=[2**40], at=[0, 2**42])}, 8, f"tensor 'a': is cut off: it ends at byte {2**42} of 8 "),
        ({"a": entry(at=[8, 16])}, 16, "tensor 'a': data_offsets: are"),
        ({"a": entry(at=[0, 4])}, 8, "tensor 'a': data_offsets"),
        ({"a": entry(at=[8, 0])}, 8, "tensor 'a': data_offsets"),
        ({"a": entry(at=[-8, 0])}, 8, "tensor 'a': data_offsets"),
        ({"a": entry(at=[0, 8, 16])}, 8, "tensor 'a': data_offsets"),
        ({"a": entry(at=[])}, 8, "tensor 'a': data_offsets"),
        ({"a": entry(at=[0, True])}, 8, r"tensor 'a': data_offsets\[1\]: must be an integer"),
        ({"a": entry(), "b": entry()}, 8, "tensor '[ab]': data_offsets"),
        ({"a": entry(), "b": entry(at=[4, 12])}, 12, "tensor 'b': data_offsets"),
        ({"a": entry(), "b": entry(at=[12, 20])}, 20, "tensor 'b': data_offsets"),
        ({"a": entry()}, 9, "is damaged: its tensors end at byte 8 of 9"),
        ({"a": entry()}, 7, "tensor 'a': is cut off: it ends at byte 8 of 7 behind the header"),
        ({"__metadata__": {"a": 1}}, 0, "__metadata__: a: must be text"),
        ({"__metadata__": []}, 0, "__metadata__: must be an object"),
    ],
)
def test_a_hostile_header_is_refused(tmp_path, header, size, why):
    text = json.dumps(header).encode()
    (tmp_path / "x").write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))
    with pytest.raises(TraceError, match=f"x: {why}"):
        read(tmp_path / "x")


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "of 0 bytes, 0 would be its header"),
        (b"\x02\0\0\0\0\0\0", "is damaged"),
        (b"\x02\0\0\0\0\0\0\0{", "of 9 bytes, 2 would be its header"),
        (b"\xff" * 8 + b"{}", "would be its header"),
        (b"\x02\0\0\0\0\0\0\0{]", "header: is no JSON"),
        (b"\x09\0\0\0\0\0\0\0" + b'{"a":NaN}', "header: is no JSON: NaN is no number"),
        (b"\x0d\0\0\0\0\0\0\0" + b'{"a":1,"a":1}', "header: is no JSON: it has 'a' twice"),
    ],
)
def test_a_damaged_beginning_is_refused(tmp_path, data, why):
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(TraceError, match=f"x: .*{why}"):
        read(tmp_path / "x")


def test_a_truncated_file_is_refused_wherever_it_ends(tmp_path):
    write(tmp_path / "x", {"a": Tensor.of(np.arange(5.0)), "b": Tensor.of(np.arange(3, dtype=np.int8))})
    whole = (tmp_path / "x").read_bytes()
    for end in range(len(whole)):
        (tmp_path / "x").write_bytes(whole[:end])
        with pytest.raises(TraceError, match="x: "):
            read(tmp_path / "x")


def test_changed_bytes_raise_nothing_else(tmp_path):
    write(tmp_path / "x", some())
    whole, gen = (tmp_path / "x").read_bytes(), rng("damage")
    end = 8 + int.from_bytes(whole[:8], "little")
    refused = 0
    for _ in range(300):
        damaged = bytearray(whole)
        for at in gen.integers(0, end, gen.integers(1, 4)):
            damaged[at] = gen.integers(0, 256)
        (tmp_path / "x").write_bytes(damaged)
        try:
            read(tmp_path / "x")
        except TraceError:
            refused += 1
    assert refused > 100
