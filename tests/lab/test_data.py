import os

import numpy as np
import pytest

from diptych.lab import data
from lab_files import SPECIAL, make


def test_default_is_the_standard_library_and_the_same_twice():
    a, b = data.load(cap=1 << 19), data.load(cap=1 << 19)
    assert len(a.train) + len(a.valid) == 1 << 19
    assert np.array_equal(a.train, b.train) and np.array_equal(a.valid, b.valid)
    assert "standard library" in a.source
    assert 2.5 < a.unigram_entropy < 4.0


def test_batches_are_a_function_of_seed_and_step(small):
    first = small.batch(1, 7, 4, 16)
    small.batch(1, 8, 4, 16)
    assert first.dtype == np.int32 and first.shape == (4, 17)
    assert np.array_equal(first, small.batch(1, 7, 4, 16))
    assert not np.array_equal(first, small.batch(1, 8, 4, 16))
    assert not np.array_equal(first, small.batch(2, 7, 4, 16))


def test_windows_hold_what_the_split_holds(small):
    joined = small.train.tobytes()
    assert all(bytes(row.astype(np.uint8)) in joined for row in small.batch(0, 0, 4, 16))
    held = small.validation_batches(3, 4, 16)
    assert len(held) == 3 and all(b.shape == (4, 17) for b in held)
    assert all(bytes(row.astype(np.uint8)) in small.valid.tobytes() for b in held for row in b)


def test_one_file_is_split_at_its_tail_and_many_by_file(tmp_path):
    one = tmp_path / "one.txt"
    one.write_bytes(bytes(range(200)))
    loaded = data.load(one)
    assert loaded.train.tobytes() == bytes(range(180)) and loaded.valid.tobytes() == bytes(range(180, 200))
    many = tmp_path / "many"
    many.mkdir()
    for i in range(20):
        (many / f"{i:02}.bin").write_bytes(bytes([i]) * 10)
    (many / ".hidden").write_bytes(b"x")
    loaded = data.load(many)
    assert loaded.files == 20
    assert set(loaded.valid.tolist()) == {9, 19}
    assert set(loaded.train.tolist()) == set(range(20)) - {9, 19}


def test_cap_cuts_the_last_file(tmp_path):
    path = tmp_path / "long"
    path.write_bytes(b"a" * 1000)
    loaded = data.load(path, cap=100)
    assert len(loaded.train) + len(loaded.valid) == 100


def test_entropy_of_two_equally_frequent_bytes():
    both = np.array([0, 1] * 50, np.uint8)
    assert data.ByteData(both, both, "", 1).unigram_entropy == pytest.approx(np.log(2))


@pytest.mark.parametrize("make", [lambda p: p / "missing", lambda p: p])
def test_missing_or_empty_is_an_error(tmp_path, make):
    with pytest.raises(data.DataError, match=str(tmp_path)):
        data.load(make(tmp_path))


def test_too_small_is_an_error_that_names_the_need(tmp_path):
    path = tmp_path / "short"
    path.write_bytes(b"abc" * 30)
    with pytest.raises(data.DataError, match="validation split has 9 bytes and a window needs 66"):
        data.load(path).check(64)


@pytest.mark.parametrize("what", SPECIAL[1:])
def test_what_is_no_file_is_said(tmp_path, what):
    with pytest.raises(data.DataError, match=f"x: is {what}; give a file or a folder of files"):
        data.load(make(tmp_path / "x", what))


def test_a_folder_without_files_of_its_own(tmp_path):
    make(tmp_path / "pipe", "a named pipe")
    (tmp_path / ".hidden").write_bytes(b"x" * 100)
    with pytest.raises(data.DataError, match="a folder without files to train on"):
        data.load(tmp_path)
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(data.DataError, match="holds no bytes to train on"):
        data.load(tmp_path)


def test_a_folder_that_cannot_be_listed_is_not_skipped(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(b"x" * 100)
    (tmp_path / "closed").mkdir()
    scan = os.scandir

    def refuse(path):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(data.DataError, match="closed: cannot be read: Permission denied"):
        data.load(tmp_path)


def test_a_cap_beyond_memory_reads_what_is_there(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 100)
    loaded = data.load(tmp_path, cap=10**30)
    assert len(loaded.train) + len(loaded.valid) == 100
