"""The models' own definitions in float64: what they cast to float32 whatever their dtype, with these casts left out.

Each name in `PATCHES` is a place in transformers 4.57.6. Without these patches float64 models of both frameworks differ
by 1e-8, the rounding of float32, and not by 1e-16.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import torch
from transformers.models.llama import modeling_flax_llama, modeling_llama
from transformers.models.vit import modeling_vit


def _rms_norm(self: Any, x: torch.Tensor) -> torch.Tensor:
    """LlamaRMSNorm.forward casts its input to float32."""
    return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


def _frequencies(self: Any, dtype: Any) -> torch.Tensor:
    dim = 2 * len(self.inv_freq)
    return self.config.rope_theta ** -(torch.arange(0, dim, 2, dtype=dtype) / dim)


@torch.no_grad()
def _rotary(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """LlamaRotaryEmbedding computes frequencies, angles, sines and cosines in float32."""
    angles = position_ids[..., None].to(x.dtype) * _frequencies(self, x.dtype)
    angles = torch.cat((angles, angles), -1)
    return angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling


def _softmax(x: torch.Tensor, dim: int, dtype: Any = None) -> torch.Tensor:
    """eager_attention_forward of Llama and ViT asks for a softmax in float32."""
    return torch.softmax(x, dim)


class _Functional:
    """torch.nn.functional with this softmax."""

    softmax = staticmethod(_softmax)
    dropout = staticmethod(torch.nn.functional.dropout)


class _Modules:
    functional = _Functional


def _attention(original: Callable) -> Callable:
    """The same code, with `nn` bound to `_Modules`."""
    return type(original)(original.__code__, {**original.__globals__, "nn": _Modules}, None, original.__defaults__)


def _flax_rms_norm(self: Any, x: Any) -> Any:
    """FlaxLlamaRMSNorm computes the mean of squares in float32."""
    return self.weight * (x / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + self.epsilon))


_flax_rms_norm.__name__ = "__call__"


def _sines(num_pos: int, dim: int) -> Any:
    """create_sinusoidal_positions makes a table in float32."""
    angles = np.arange(num_pos)[:, None] * 10000.0 ** -(np.arange(0, dim, 2) / dim)
    angles = np.concatenate((angles, angles), -1)
    return jnp.array(np.concatenate((np.sin(angles), np.cos(angles)), -1)[:, None])


def _weights(query: Any, key: Any, *, dtype: Any = None, **rest: Any) -> Any:
    """FlaxLlamaAttention asks for a softmax in float32 unless the model's dtype is float32."""
    return nn.dot_product_attention_weights(query, key, dtype=query.dtype, **rest)


PATCHES: dict[str, Callable[[], Any]] = {
    "modeling_llama.LlamaRMSNorm": lambda: mock.patch.object(modeling_llama.LlamaRMSNorm, "forward", _rms_norm),
    "modeling_llama.LlamaRotaryEmbedding": lambda: mock.patch.object(
        modeling_llama.LlamaRotaryEmbedding, "forward", _rotary
    ),
    "modeling_llama.eager_attention_forward": lambda: mock.patch.object(
        modeling_llama, "eager_attention_forward", _attention(modeling_llama.eager_attention_forward)
    ),
    "modeling_vit.eager_attention_forward": lambda: mock.patch.object(
        modeling_vit, "eager_attention_forward", _attention(modeling_vit.eager_attention_forward)
    ),
    "modeling_flax_llama.FlaxLlamaRMSNorm": lambda: mock.patch.object(
        modeling_flax_llama.FlaxLlamaRMSNorm, "__call__", nn.module.wrap_method_once(_flax_rms_norm)
    ),
    "modeling_flax_llama.create_sinusoidal_positions": lambda: mock.patch.object(
        modeling_flax_llama, "create_sinusoidal_positions", _sines
    ),
    "modeling_flax_llama.dot_product_attention_weights": lambda: mock.patch.object(
        modeling_flax_llama, "dot_product_attention_weights", _weights
    ),
}


@contextlib.contextmanager
def wide(*, without: str = "") -> Iterator[None]:
    """Models that are called inside keep float64. `without`: the name of a patch that is left out."""
    with contextlib.ExitStack() as stack:
        for name, patch in PATCHES.items():
            if name != without:
                stack.enter_context(patch())
        yield
