"""Checkpoint files: written data is read back; other files are refused with a message and without allocations."""

import io
import json
import os
import re
import subprocess
import sys
import tracemalloc
import zipfile

import numpy as np
import pytest
from lab_tools import TINY, job

from diptych.common import CheckpointError
from diptych.lab import checkpoint
from diptych.lab.frontend import State
from diptych.lab.job import initial_weights
from lab_files import SPECIAL, content, example, make, npy, rewritten, said_to_be


@pytest.fixture
def path(tmp_path):
    path = tmp_path / checkpoint.FILE_NAME
    checkpoint.save(path, example())
    return path


def refused(path, match: str) -> None:
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(CheckpointError, match=match) as e:
        checkpoint.load(path)
    assert str(e.value).startswith(str(path))
    assert before is None or path.read_bytes() == before


@pytest.mark.parametrize("seed", range(8))
def test_what_was_written_comes_back(tmp_path, seed):
    path, saved = tmp_path / checkpoint.FILE_NAME, example(seed)
    checkpoint.save(path, saved)
    loaded = checkpoint.load(path)
    assert content(loaded) == content(saved)
    assert loaded.losses.flags.writeable
    before = path.read_bytes()
    checkpoint.save(path, loaded)
    assert path.read_bytes() == before  # no time, no order of this process
    with np.load(path) as f:
        assert np.array_equal(f["weights/a"], saved.state.weights["a"])
        assert json.loads(f["header"].tobytes())["version"] == checkpoint.VERSION
    assert checkpoint.load(tmp_path).framework == "torch"


def test_every_byte_matters_or_changes_nothing(path):
    """Each byte in turn, changed in one bit or in all."""
    small = {"a": np.ones(3, np.float32)}
    checkpoint.save(path, checkpoint.Checkpoint(State(1, small, {}, {}, {}), np.ones(1), {1: 0.5}, {"seed": 1}, "jax"))
    blob, want, rng = path.read_bytes(), content(checkpoint.load(path)), np.random.default_rng()
    harmless = 0
    for at in range(len(blob)):
        mask = 0xFF if rng.random() < 0.2 else 1 << int(rng.integers(8))
        changed = bytearray(blob)
        changed[at] ^= mask
        path.write_bytes(changed)
        try:
            found = content(checkpoint.load(path))
        except CheckpointError as e:
            assert str(e).startswith(str(path))
            continue
        harmless += 1
        assert found == want, f"byte {at} changed by {mask:#x}"
    assert harmless < len(blob) / 2  # times, systems and attributes, which zip keeps


def test_every_length_but_the_whole_is_refused(path):
    blob = path.read_bytes()
    for n in range(0, len(blob), 7):
        path.write_bytes(blob[:n])
        refused(path, "damaged or not a checkpoint")


@pytest.mark.parametrize("what", SPECIAL[1:])
def test_what_is_no_file(tmp_path, what):
    refused(make(tmp_path / "c.npz", what), f"c.npz: .*is {what}")


def test_a_folder_in_its_place(tmp_path):
    (tmp_path / checkpoint.FILE_NAME).mkdir()
    with pytest.raises(CheckpointError, match=r"checkpoint\.npz: cannot be read: it is a folder"):
        checkpoint.load(tmp_path)


def test_a_file_that_cannot_be_read(path, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    refused(path, "cannot be read: Permission denied")


def without(*names):
    return lambda h: {k: v for k, v in h.items() if k not in names}


FORGERIES = [
    ({"compression": zipfile.ZIP_DEFLATED}, "'weights/a.npy' is compressed, checkpoints are not"),
    ({"header": lambda h: [h]}, "header is no JSON object but list"),
    ({"header": lambda h: None}, "header is no JSON object but NoneType"),
    *[({"header": without(name)}, f"header has no {name}") for name in checkpoint._FIELDS],
    ({"header": lambda h: {**h, "version": 2}}, "written in checkpoint format 2, this diptych reads 3"),
    ({"header": lambda h: {**h, "step": True}}, "step of type bool, must have step of type int"),
    ({"header": lambda h: {**h, "step": -1}}, "says step -1"),
    ({"header": lambda h: {**h, "step": h["step"] + 1}}, "the losses of 3 steps must be as many float64"),
    ({"header": lambda h: {**h, "more": 1}}, "unknown fields: 'more'"),
    ({"header": lambda h: {**h, "validation": {"x": 1.0}}}, "validation loss 1.0 after step 'x'"),
    ({"header": lambda h: {**h, "validation": {"1": None}}}, "validation loss None after step '1'"),
    ({"header": lambda h: {**h, "framework": "x"}, "sign": False}, "do not match the digest"),
    ({"drop": ["weights/a.npy"], "sign": False}, "do not match the digest"),
    ({"drop": ["losses.npy"]}, "there are none"),
    ({"drop": ["header.npy"]}, "it holds no header"),
    ({"extra": {"readme.txt": b"hello"}}, "'readme.txt' is there twice or is no .npy"),
    ({"extra": {"weight/a.npy": npy(np.ones(2))}}, "an array 'weight/a', which belongs to no part"),
    ({"extra": {"weights/a.npy": npy(np.array(["text"]))}}, "weights/a has no header of an array of numbers"),
    ({"extra": {"weights/a.npy": npy(np.array([None], object))}}, "weights/a has no header of an array of numbers"),
    ({"extra": {"weights/a.npy": npy(np.ones(2, ">f4"))}}, "weights/a has no header of an array of numbers"),
    ({"extra": {"weights/a.npy": said_to_be("(3,)", "<f3", bytes(9))}}, "weights/a has a dtype that is unknown: '<f3'"),
    ({"extra": {"weights/a.npy": said_to_be("(10000000000000,)")}}, r"float32\[10000000000000\] and has 0 bytes"),
    ({"extra": {"weights/a.npy": said_to_be("(9999999999, 9999999999, 0)")}}, "weights/a is said to be"),
    ({"extra": {"weights/a.npy": b""}}, "weights/a has no header"),
    ({"extra": {"header.npy": npy(np.frombuffer(b"{" * 100, np.uint8))}}, "header is no JSON"),
    ({"extra": {"header.npy": npy(np.frombuffer(b"[" * 100_000, np.uint8))}}, "header is no JSON"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "words"), FORGERIES, ids=lambda v: re.sub(r"\W+", "-", v) if type(v) is str else "")
def test_a_forgery_is_named(path, change, words):
    if "header.npy" in (extra := change.get("extra", {})):
        with zipfile.ZipFile(path, "w") as z:
            z.writestr("header.npy", extra["header.npy"])
    else:
        rewritten(path, **change)
    refused(path, words)


def test_an_unchanged_rewrite_loads(path):
    """Or the forgeries would be refused for their rewriting."""
    want = content(checkpoint.load(path))
    rewritten(path)
    assert content(checkpoint.load(path)) == want


def test_a_single_array(path):
    path.write_bytes(npy(np.ones(100)))
    refused(path, "damaged or not a checkpoint .it is a single array, not an archive.")
    path.write_bytes(b"")
    refused(path, "damaged or not a checkpoint .it is empty.")


def test_no_file_takes_more_memory_than_it_has_bytes(path):
    """A bomb of zeros, sizes that lie, and members that share their bytes."""
    bombs = []
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as z:
        z.writestr("weights/a.npy", said_to_be("(25000000,)", data=bytes(100_000_000)))
    bombs.append(out.getvalue())
    blob = bytearray(path.read_bytes())
    at = blob.index(b"PK\x01\x02")
    blob[at + 20 : at + 28] = (1 << 31).to_bytes(4, "little") * 2
    bombs.append(bytes(blob))
    out = io.BytesIO()
    big = said_to_be("(250000,)", data=bytes(1_000_000))
    with zipfile.ZipFile(out, "w") as z:
        z.writestr("weights/a.npy", big)
        first = z.infolist()[0]
        for i in range(200):
            again = zipfile.ZipInfo(f"weights/{i}.npy")
            again.file_size = again.compress_size = first.file_size
            again.CRC, again.header_offset = first.CRC, first.header_offset
            z.filelist.append(again)
    bombs.append(out.getvalue())
    for bomb in bombs:
        path.write_bytes(bomb)
        tracemalloc.start()
        refused(path, "compressed|more bytes than the file|damaged")
        assert tracemalloc.get_traced_memory()[1] < len(bomb) * 3 + 1_000_000
        tracemalloc.stop()


def test_arrays_that_are_not_the_models(tmp_path):
    weights = initial_weights(TINY, 0)
    zeros = {k: np.zeros_like(v) for k, v in weights.items()}
    for section in ("weights", "first", "second"):
        for change, words in (
            (lambda w: w.pop("head.weight"), "lacks head.weight"),
            (lambda w: w.update({"norm.bias": np.zeros(3, np.float32)}), r"norm.bias is float32\[3\], must be float32"),
            (lambda w: w.update({"norm.bias": np.zeros(32)}), r"norm.bias is float64\[32\], must be float32\[32\]"),
            (lambda w: w.update({"more": np.zeros(3)}), "has arrays that this run does not have: more"),
        ):
            parts = {"weights": dict(weights), "first": dict(zeros), "second": dict(zeros)}
            change(parts[section])
            found = checkpoint.Checkpoint(State(0, **parts, quantizing={}), np.zeros(0), {}, {}, "torch")
            with pytest.raises(CheckpointError, match=f"c.npz: {section}.*{words}"):
                checkpoint.check(found, job(), {}, tmp_path / "c.npz")


@pytest.mark.parametrize("recipe", ["none", "fp8-delayed", "nvfp4"])
def test_states_of_quantizers_are_all_there(tmp_path, recipe):
    weights = initial_weights(TINY, 0)
    names = sorted(checkpoint._quantizing_names(job(recipe)))
    assert len(names) == len(TINY.linears) * {"none": 0, "fp8-delayed": 9, "nvfp4": 1}[recipe]
    kept = {name: np.zeros(1, np.float32) for name in names}
    for change, words in (
        (None, ""),
        (lambda k: k.update(more=np.zeros(1)), "quantizing has arrays that this run does not have: more"),
        *[(lambda k, name=name: k.pop(name), f"quantizing lacks {name}") for name in names[:2]],
    ):
        state = State(1, weights, weights, weights, dict(kept))
        found = checkpoint.Checkpoint(state, np.zeros(1), {}, {}, "torch")
        if change is None:
            checkpoint.check(found, job(recipe), {}, tmp_path)
            continue
        change(state.quantizing)
        with pytest.raises(CheckpointError, match=words):
            checkpoint.check(found, job(recipe), {}, tmp_path)


def test_only_numbers_are_saved(tmp_path):
    bad = example()
    bad.state.weights["a"] = np.array(["text"])
    with pytest.raises(TypeError, match="a checkpoint holds arrays of numbers, not of <U4"):
        checkpoint.save(tmp_path / "c.npz", bad)
    assert not list(tmp_path.iterdir())


def test_a_disk_that_is_full_at_any_byte(path):
    """The old file stays, nothing else does, and the error names the file."""
    code = (
        "import pathlib, resource, sys\nfrom diptych.lab import checkpoint, files\n"
        "path = pathlib.Path(sys.argv[1]); c = checkpoint.load(path); c.framework = 'jax'; old = path.read_bytes()\n"
        "for limit in range(0, len(old) - 2, 64):\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, -1))\n"
        "    try: checkpoint.save(path, c)\n"
        "    except files.FileError as e:\n"
        "        assert str(e) == f'{path}: cannot be written: File too large; the file there is as it was', e\n"
        "    else: sys.exit(f'no error at {limit}')\n"
        "    assert path.read_bytes() == old and len(list(path.parent.iterdir())) == 1\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1)); checkpoint.save(path, c)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, env={**os.environ, "PYTHONPATH": ""})
    assert checkpoint.load(path).framework == "jax"
