"""`hash` in NumPy, written from section 10 of docs/numerics.md."""

from __future__ import annotations

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_BLOCK = 256  # words


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _g(n: np.ndarray) -> np.ndarray:
    return _mix((n.astype(np.uint64) + np.uint64(1)) * _GOLDEN)


def _padded(rows: np.ndarray) -> np.ndarray:
    """uint8 [n, bytes] -> words, uint32 [n, blocks, 256]."""
    n, size = rows.shape
    blocks = -(-size // (4 * _BLOCK))
    out = np.zeros((n, blocks * 4 * _BLOCK), np.uint8)
    out[:, :size] = rows
    return out.view("<u4").reshape(n, blocks, _BLOCK)


def hash_rows(rows: np.ndarray) -> np.ndarray:
    """uint8 [n, bytes] -> the hash of each row, int32 [n, 4]."""
    words = _padded(rows)
    of_words = _g(np.arange(_BLOCK))
    keys = of_words & np.uint64(0xFFFFFFFF), of_words >> np.uint64(32)
    state = []
    for lane in (0, 1):
        v = words if lane == 0 else (words << np.uint32(16)) | (words >> np.uint32(16))
        u = ((v + keys[lane]) & np.uint64(0xFFFFFFFF)) + np.uint64(1 << 32)
        products = (u[..., 0::2] * u[..., 1::2]).sum(-1, dtype=np.uint64)
        factors = _g(_BLOCK + 2 * np.arange(words.shape[1]) + lane) | np.uint64(1)
        state.append((products * factors).sum(-1, dtype=np.uint64))
    x, y = state[0] + np.uint64(rows.shape[1]), state[1] + _GOLDEN
    x = x + y
    y = y + x
    x, y = _mix(x), _mix(y)
    x = x + y
    y = y + x
    return np.stack([x, y], -1).astype("<u8").view("<i4")


def hash_bits(x: np.ndarray) -> np.ndarray:
    """The hash of an array's bits, int32 [4]."""
    return hash_rows(np.frombuffer(x.tobytes(), np.uint8)[None])[0]
