"""The random Hadamard transform and the noise of stochastic rounding (NUMERICS 5)."""

from __future__ import annotations

import numpy as np

from oracle.formats import BF16, cast

SIGNS = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], np.float32)
LENGTH = 16


def hadamard(x: np.ndarray, signs: bool) -> np.ndarray:
    """`[M, K]` bfloat16, each 16 consecutive rows rotated, in the tensor's own orientation."""
    if x.dtype != BF16:
        raise TypeError(f"the Hadamard transform takes bfloat16, not {x.dtype}")
    m, k = x.shape
    if m % LENGTH:
        raise ValueError(f"the Hadamard transform takes multiples of {LENGTH} rows, not {m}")
    s = SIGNS if signs else np.ones(LENGTH, np.float32)
    with np.errstate(all="ignore"):
        z = x.reshape(m // LENGTH, LENGTH, k).astype(np.float32) * (s / np.float32(4))[None, :, None]
        for h in (1, 2, 4, 8):
            first = np.array([i for i in range(LENGTH) if i & h == 0])
            low, high = z[:, first], z[:, first + h]
            z[:, first], z[:, first + h] = low + high, low - high
    return cast(z, BF16).reshape(m, k)


def philox(counter: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Philox4x32-10 (Salmon et al., SC 2011): uint32 counters `[n, 4]` to uint32 words `[n, 4]`."""
    c = [np.ascontiguousarray(counter[:, i], np.uint64) for i in range(4)]
    k, low = [np.uint64(v) for v in key], np.uint64(0xFFFFFFFF)
    for _ in range(10):
        a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [b >> np.uint64(32) ^ c[1] ^ k[0], b & low, a >> np.uint64(32) ^ c[3] ^ k[1], a & low]
        k = [(k[0] + np.uint64(0x9E3779B9)) & low, (k[1] + np.uint64(0xBB67AE85)) & low]
    return np.stack(c, axis=1).astype(np.uint32)


def rng_words(seed: int, offset: int, *place: int) -> np.ndarray:
    """Returns the `rng` of a call that rounds stochastically: int32 `[4]`, low and high words of seed and offset.

    `place`: of a part, which gets int32 `[8]`: its row and column in the whole tensor, the whole tensor's extents.
    """
    words = [seed & 0xFFFFFFFF, seed >> 32, offset & 0xFFFFFFFF, offset >> 32, *place]
    return np.array(words, np.uint32).view(np.int32)


def noise(count: int, rng: np.ndarray, columnwise: bool) -> np.ndarray:
    """The random bytes `[count]` of one copy's elements; the columnwise copy uses the next offset."""
    words = [int(w) for w in np.asarray(rng, np.int32).view(np.uint32)]
    offset = (words[2] | words[3] << 32) + columnwise & (1 << 64) - 1
    block = np.arange(-(-count // 16), dtype=np.uint64)
    counter = np.empty((len(block), 4), np.uint32)
    counter[:, 0], counter[:, 1] = block & np.uint64(0xFFFFFFFF), block >> np.uint64(32)
    counter[:, 2], counter[:, 3] = offset & 0xFFFFFFFF, offset >> 32
    return philox(counter, (words[0], words[1])).astype("<u4").view(np.uint8).reshape(-1)[:count]


def noise_of(shape: tuple[int, int], rng: np.ndarray, columnwise: bool) -> np.ndarray:
    """The random bytes of a copy of this shape; those of a part are cut out of the whole tensor's."""
    rng = np.asarray(rng, np.int32).reshape(-1)
    place = (0, 0, *shape) if rng.size == 4 else tuple(int(n) for n in rng[4:])
    row, column, rows, columns = place
    if columnwise and rng.size == 8:
        row, column, rows, columns = column, row, columns, rows
    whole = noise(rows * columns, rng[:4], columnwise).reshape(rows, columns)
    return whole[row : row + shape[0], column : column + shape[1]]
