"""Headers of safetensors files and indexes, against the safetensors library; damaged and absent files."""

from __future__ import annotations

import json

import pytest
import safetensors
import torch
from safetensors.torch import save_file

from diptych.common.errors import CheckpointError
from diptych.common.safetensors import DTYPES, checkpoint_entries, element_bytes, file_entries

SHAPES = {"scalar": (), "empty": (3, 0), "vector": (5,), "matrix": (4, 6)}


def tensors() -> dict[str, torch.Tensor]:
    """One tensor of each shape and dtype, with random bytes."""
    made = {}
    for name in DTYPES.values():
        for shape_name, shape in SHAPES.items():
            dtype = getattr(torch, name)
            raw = torch.randint(0, 2 if name == "bool" else 256, (*shape, dtype.itemsize), dtype=torch.uint8)
            made[f"{name} {shape_name}"] = raw.view(dtype).reshape(shape)
    return made


def test_places_are_those_of_the_library(tmp_path):
    path, written = tmp_path / "x.safetensors", tensors()
    save_file(written, path, {"format": "pt"})
    found, data = file_entries(path), path.read_bytes()
    with safetensors.safe_open(path, "pt") as theirs:
        assert found.keys() == set(theirs.keys()) == written.keys()
    for name, entry in found.items():
        t = written[name]
        assert (entry.path, entry.dtype, entry.shape) == (path, str(t.dtype)[6:], tuple(t.shape))
        assert element_bytes(entry.dtype) == t.element_size()
        assert data[entry.begin : entry.end] == t.reshape(-1).view(torch.uint8).numpy().tobytes()


def test_files_of_a_checkpoint(tmp_path):
    """A file, an index and a folder; in a folder the known names go before others."""
    a, b = {"a": torch.zeros(2)}, {"b": torch.ones(3), "a": torch.ones(9)}
    save_file(a, tmp_path / "one.safetensors")
    assert checkpoint_entries(tmp_path).keys() == {"a"} == checkpoint_entries(str(tmp_path / "one.safetensors")).keys()
    save_file(b, tmp_path / "two.safetensors")
    with pytest.raises(CheckpointError, match=r"several of \*.safetensors \(one.safetensors, two.safetensors"):
        checkpoint_entries(tmp_path)
    index = tmp_path / "some.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    for path in (tmp_path, index):
        found = checkpoint_entries(path)
        assert {n: (e.path.name, e.shape) for n, e in found.items()} == {
            "a": ("one.safetensors", (2,)),
            "b": ("two.safetensors", (3,)),
        }
    save_file({"c": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert checkpoint_entries(tmp_path).keys() == {"c"}


@pytest.mark.parametrize(
    ("index", "said"),
    (
        ("{", "is no index of safetensors files"),
        ('{"weights": {}}', "is no index of safetensors files"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "names the file 'gone.safetensors', which does not exist"),
        ('{"weight_map": {"z": "one.safetensors"}}', "'z' is not in 'one.safetensors'"),
    ),
)
def test_a_wrong_index_is_refused(index, said, tmp_path):
    save_file({"a": torch.zeros(2)}, tmp_path / "one.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=said):
        checkpoint_entries(tmp_path)


def test_what_does_not_exist_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"holds no \*.safetensors file"):
        checkpoint_entries(tmp_path)
    with pytest.raises(CheckpointError, match="no such file or folder"):
        checkpoint_entries(tmp_path / "gone")


def _header(entry: dict) -> bytes:
    text = json.dumps({"a": entry}).encode()
    return len(text).to_bytes(8, "little") + text + bytes(8)


@pytest.mark.parametrize(
    "data",
    (
        b"",
        b"1234567",
        (1 << 40).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (2).to_bytes(8, "little") + b"{x",
        _header({"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}),
        _header({"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}),
        _header({"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}),
        _header({"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}),
        _header({"dtype": "F32", "data_offsets": [0, 4]}),
    ),
)
def test_a_damaged_file_is_refused(data, tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="is no safetensors file, or a damaged one"):
        file_entries(path)
