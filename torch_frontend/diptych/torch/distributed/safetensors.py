"""Writes a safetensors file one tensor after the other, so that no process needs room for all of them.

The file is the length of its header as 8 bytes, the header as JSON (each tensor's dtype, shape and place) and the
tensors' bytes. Tensors of larger elements come first, so that each is aligned.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diptych.common.files import replacing
from diptych.common.safetensors import DTYPES

_NAMES = {getattr(torch, name): code for code, name in DTYPES.items()}


def in_order(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns tensors in the order of a file. **Raises** ValueError if safetensors files do not have a dtype."""
    for name, t in tensors.items():
        if t.dtype not in _NAMES:
            raise ValueError(f"{name} is {t.dtype}, which safetensors files do not hold; cast it before")
    return dict(sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])))


def write(path: Path, forms: Mapping[str, Tensor], values: Iterable[Tensor]) -> None:
    """Writes a file atomically. `forms`: the result of `in_order`, which gives dtypes and shapes alone. `values`: the
    tensors, in this order. **Raises** FileError if the file cannot be written."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, t in forms.items():
        begin, end = end, end + math.prod(t.shape) * t.dtype.itemsize
        header[name] = {"dtype": _NAMES[t.dtype], "shape": list(t.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with replacing(path) as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for _, t in zip(forms, values, strict=True):
            f.write(t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
