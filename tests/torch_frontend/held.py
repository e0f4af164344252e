"""Helpers for tests of held weights: layers with a held weight, and the expected buffers."""

from __future__ import annotations

from typing import Any

import torch

import diptych.torch as dt
from diptych.common import MXFP8BlockScaling
from diptych.torch.tensors.quantized import BUFFERS
from torch_frontend.layer_cases import NAMED
from torch_frontend.tools import same

MX = MXFP8BlockScaling()
KINDS = {"tensor": (64, 96), "stack": (3, 64, 96)}


def layer(kind: str = "tensor", recipe: Any = MX, **kw: Any) -> Any:
    """Returns a layer that holds its weight quantized."""
    with dt.quantized_model_init(recipe=recipe, **kw):
        return dt.GroupedLinear(3, 96, 64, bias=False) if kind == "stack" else dt.Linear(96, 64, bias=False)


def weight(kind: str = "tensor", name: str = "mxfp8") -> Any:
    return layer(kind, NAMED[name]).weight


def requantized(q: Any, values: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns the buffers that the quantizer of q makes of these values."""
    made: Any = (dt.quantize_stack if q.dim() == 3 else dt.quantize)(values.detach(), q.quantizer)
    return buffers(made)


def buffers(q: Any) -> dict[str, torch.Tensor]:
    return {name: t for name in BUFFERS if (t := getattr(q, name)) is not None}


def same_buffers(q: Any, want: dict[str, torch.Tensor]) -> None:
    assert buffers(q).keys() == want.keys()
    for name, t in buffers(q).items():
        same(t, want[name], name)
