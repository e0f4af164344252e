"""Faults that are planted into one model of a pair, each with the site at which a comparison must find it first.

A fault changes what one module of the second layer does, what it reads, or a parameter; the models' source stays as it
is. Sites are spelled as in the framework that has the fault, and exist in the other framework too: a GELU is a module
in torch alone, so a wrong one is first seen behind the product that follows it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import torch
from transformers.activations import ACT2FN
from transformers.modeling_flax_utils import ACT2FN as FLAX_ACT2FN
from transformers.models.gpt2 import modeling_flax_gpt2, modeling_gpt2
from transformers.models.llama import modeling_flax_llama, modeling_llama
from transformers.models.vit import modeling_flax_vit, modeling_vit

Enter = Callable[[Any], contextlib.AbstractContextManager[Any]]
"""A context around a call of a module."""
OLDER = 1 - 2**-10
"""The ratio of a parameter's value before the last update to its present value."""
GIVEN = {
    "gpt2": {"n_layer": 2, "activation_function": "gelu"},
    "llama": {"num_hidden_layers": 2, "hidden_act": "gelu", "attention_bias": True},
    "vit": {"num_hidden_layers": 2, "hidden_act": "gelu", "qkv_bias": True},
}
"""Configs that can have all faults of their model."""
IMPOSSIBLE = {
    ("rotary", "gpt2"): "positions are learned",
    ("rotary", "vit"): "positions are learned",
    ("mask", "vit"): "every patch sees all others",
}
"""Kinds that a model cannot have, in either framework, and why.

A rotary embedding that is off by one for queries and keys alike is no fault: only differences of positions count.
"""


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where a model has what a fault needs: paths inside of a layer, and Flax's classes of these modules."""

    stack: str
    norm: str
    attention: str
    attended: str  # the first site behind the product of weights and values
    square: str
    biased: str
    mlp: str
    act: tuple[str, str]  # the activation in torch's and in Flax's mlp
    activated: str  # the first site behind the activation that both frameworks have
    ours: Any  # torch's source file
    flax: Any
    norm_class: type[nn.Module]
    dense_class: type[nn.Module]
    attention_class: type[nn.Module]
    mlp_class: type[nn.Module]
    block_class: type[nn.Module]
    tuples: bool  # torch's layers return a tuple, as Flax's do


LAYOUTS = {
    "gpt2": Layout(
        "transformer.h", "ln_2", "attn", "attn.c_proj", "attn.c_proj", "mlp.c_fc", "mlp", ("act", "act"), "mlp.c_proj",
        modeling_gpt2, modeling_flax_gpt2, nn.LayerNorm, modeling_flax_gpt2.FlaxConv1D,
        modeling_flax_gpt2.FlaxGPT2Attention, modeling_flax_gpt2.FlaxGPT2MLP, modeling_flax_gpt2.FlaxGPT2Block, True,
    ),
    "llama": Layout(
        "model.layers", "post_attention_layernorm", "self_attn", "self_attn.o_proj", "self_attn.q_proj",
        "self_attn.v_proj", "mlp", ("act_fn", "act"), "mlp.down_proj", modeling_llama, modeling_flax_llama,
        modeling_flax_llama.FlaxLlamaRMSNorm, nn.Dense, modeling_flax_llama.FlaxLlamaAttention,
        modeling_flax_llama.FlaxLlamaMLP, modeling_flax_llama.FlaxLlamaDecoderLayer, False,
    ),
    "vit": Layout(
        "vit.encoder.layer", "layernorm_after", "attention.attention", "attention.attention[0]",
        "attention.output.dense", "intermediate.dense", "intermediate", ("intermediate_act_fn", "activation"),
        "intermediate", modeling_vit, modeling_flax_vit, nn.LayerNorm, nn.Dense,
        modeling_flax_vit.FlaxViTSelfAttention, modeling_flax_vit.FlaxViTIntermediate, modeling_flax_vit.FlaxViTLayer,
        False,
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Fault:
    """`kind`: of the site that is found first, one of `sites`. `plant`: called with torch's model, or with None for
    Flax; the fault is there while its context is entered. `change`: of Flax's parameters, by their paths."""

    name: str
    model: str
    framework: str
    kind: str
    sites: tuple[str, ...]
    plant: Callable[[Any], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    change: tuple[str, Callable[[Any], Any]] | None = None
    reduction: str = "mean"

    def changed(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Returns Flax's parameters with the fault."""
        if self.change is None:
            return dict(params)
        path, change = self.change
        keys = path.split("/")

        def walk(node: Any, left: list[str]) -> Any:
            return {**node, left[0]: walk(node[left[0]], left[1:])} if left else change(node)

        return walk(params, keys)

    def __str__(self) -> str:
        return f"{self.model}-{self.framework}-{self.name}"


# --- ways to change what a module does, in both frameworks ---


def shadow(name: str, value: Callable[[Any], Any]) -> Enter:
    """An attribute that has another value during the call. It is read first, since Flax sets up modules when they are
    read, and would replace the value."""

    @contextlib.contextmanager
    def enter(module: Any) -> Iterator[None]:
        getattr(module, name)
        new, own = value(module), module.__dict__
        old = own.get(name, enter)
        own[name] = new
        try:
            yield
        finally:
            del own[name]
            if old is not enter:
                own[name] = old

    return enter


def swap(source: Any, name: str, wrap: Callable[[Any], Any]) -> Enter:
    """A function of a source file that is another one during the call."""
    return lambda module: mock.patch.object(source, name, wrap(getattr(source, name)))


def torch_call(path: str, enter: Enter) -> Callable[[Any], contextlib.AbstractContextManager[Any]]:
    @contextlib.contextmanager
    def plant(model: Any) -> Iterator[None]:
        module = model.get_submodule(path)

        def forward(*args: Any, **kwargs: Any) -> Any:
            with enter(module):
                return type(module).forward(module, *args, **kwargs)

        module.forward = forward
        try:
            yield
        finally:
            del module.forward

    return plant


def flax_call(cls: type, path: str, enter: Enter) -> Callable[[Any], contextlib.AbstractContextManager[Any]]:
    @contextlib.contextmanager
    def plant(_: Any) -> Iterator[None]:
        original, place = cls.__call__, tuple(path.replace(".", "/").split("/"))

        def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
            with enter(self) if self.path == place else contextlib.nullcontext():
                return original(self, *args, **kwargs)

        with mock.patch.object(cls, "__call__", __call__):
            yield

    return plant


def flax_param(name: str, change: Callable[[Any], Any]) -> Enter:
    """A parameter that is read changed."""

    def value(module: Any) -> Any:
        read = type(module).param.__get__(module)
        return lambda key, *args, **kwargs: (change if key == name else lambda p: p)(read(key, *args, **kwargs))

    return shadow("param", value)


class Double(torch.autograd.Function):
    """The identity, whose gradient is twice what it should be."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return 2 * g


@jax.custom_vjp
def double(x: Any) -> Any:
    return x


double.defvjp(lambda x: (x, None), lambda _, g: (2 * g,))


def _split(x: Any) -> Any:
    """Heads of [B, H, S, D], made from [B, S, H x D] without moving the axes."""
    b, h, s, d = x.shape
    return (x.transpose(1, 2) if isinstance(x, torch.Tensor) else x.swapaxes(1, 2)).reshape(b, h, s, d)


# --- the faults ---


def _torch(model: str) -> Iterator[Fault]:
    at, layer = LAYOUTS[model], LAYOUTS[model].stack + ".1."
    eps = "variance_epsilon" if model == "llama" else "eps"

    def fault(name: str, kind: str, *sites: str, **rest: Any) -> Fault:
        return Fault(name, model, "torch", kind, sites, **rest)

    def call(name: str, site: str, module: str, enter: Enter) -> Fault:
        return fault(name, "activation", layer + site, plant=torch_call(layer + module, enter))

    def attention(wrap: Callable[[Any], Any]) -> Enter:
        return swap(at.ours, "eager_attention_forward", wrap)

    yield call("epsilon", at.norm, at.norm, shadow(eps, lambda m: 1e-3 + getattr(m, eps)))
    yield call("scale", at.norm, at.norm, shadow("weight", lambda m: torch.ones_like(m.weight)))
    yield call(
        "scaling", at.attended, at.attention,
        attention(lambda f: lambda m, q, *rest, **k: f(m, q * math.sqrt(q.shape[-1]), *rest, **k)),
    )  # fmt: skip
    yield call("transposed", at.square, at.square, shadow("weight", lambda m: m.weight.T))
    act = f"{layer}{at.mlp}.{at.act[0]}"
    yield fault(
        "gelu", "activation", layer + at.activated,
        plant=lambda m: shadow("forward", lambda _: ACT2FN["gelu_new"].forward)(m.get_submodule(act)),
    )  # fmt: skip
    yield call("bias", at.biased, at.biased, shadow("bias", lambda m: torch.zeros_like(m.bias)))
    yield call(
        "heads", at.attended, at.attention,
        attention(lambda f: lambda m, q, k, *rest, **kw: f(m, _split(q), _split(k), *rest, **kw)),
    )  # fmt: skip
    if model == "llama":
        yield call("rotary", at.attended, at.attention, swap(at.ours, "apply_rotary_pos_emb", _torch_rotary))
    if model != "vit":
        yield call("mask", at.attended, at.attention, _torch_mask(attention, model == "gpt2"))
    weight = f"{layer}{at.biased}.weight"
    yield fault(
        "doubled parameter", "parameter_grad", weight,
        plant=torch_call(layer + at.biased, shadow("weight", lambda m: Double.apply(m.weight))),
    )  # fmt: skip
    yield fault(
        "doubled activation", "activation_grad", at.stack + ".0" + ("[0]" if at.tuples else ""), plant=_double_input(at)
    )
    yield fault("reduction", "activation_grad", "(model)", "lm_head", "classifier", "loss", reduction="sum")
    yield fault("stale", "parameter", weight, plant=_older(weight))
    yield call("cached", at.biased, at.biased, shadow("weight", lambda m: (m.weight * OLDER).detach()))


def _torch_rotary(rotate: Callable) -> Callable:
    def rotated(q: Any, k: Any, cos: Any, sin: Any, **rest: Any) -> Any:
        return rotate(q, k, cos.roll(-1, 1), sin.roll(-1, 1), **rest)[0], rotate(q, k, cos, sin, **rest)[1]

    return rotated


def _torch_mask(attention: Callable, gpt2: bool) -> Enter:
    """Every token sees the next one. GPT-2 has a mask of its own beside the one that it is given."""

    def wrap(f: Callable) -> Callable:
        return lambda m, q, k, v, mask, *rest, **kw: f(m, q, k, v, mask.triu(2), *rest, **kw)

    @contextlib.contextmanager
    def enter(module: Any) -> Iterator[None]:
        own = shadow("bias", lambda m: torch.ones_like(m.bias).tril(1)) if gpt2 else contextlib.nullcontext
        with attention(wrap)(module), own(module):
            yield

    return enter


def _double_input(at: Layout) -> Callable:
    @contextlib.contextmanager
    def plant(model: Any) -> Iterator[None]:
        block = model.get_submodule(at.stack + ".1")
        handle = block.register_forward_pre_hook(lambda m, args: (Double.apply(args[0]), *args[1:]))
        try:
            yield
        finally:
            handle.remove()

    return plant


def _older(name: str) -> Callable:
    @contextlib.contextmanager
    def plant(model: Any) -> Iterator[None]:
        with torch.no_grad():
            model.get_parameter(name).mul_(OLDER)
        yield

    return plant


def _flax(model: str) -> Iterator[Fault]:
    at = LAYOUTS[model]
    stack = at.stack.replace(".", "/")
    layer = stack + "/1/"

    def fault(name: str, kind: str, *sites: str, **rest: Any) -> Fault:
        return Fault(name, model, "jax", kind, sites, **rest)

    def call(name: str, site: str, cls: type, module: str, enter: Enter, kind: str = "activation") -> Fault:
        return fault(name, kind, (layer + site).replace(".", "/"), plant=flax_call(cls, layer + module, enter))

    def attention(wrap: Callable[[Any], Any]) -> Enter:
        return swap(at.flax, "dot_product_attention_weights", wrap)

    scale = (
        shadow("weight", lambda m: jnp.ones_like(m.weight)) if model == "llama" else flax_param("scale", jnp.ones_like)
    )
    yield call("epsilon", at.norm, at.norm_class, at.norm, shadow("epsilon", lambda m: 1e-3 + m.epsilon))
    yield call("scale", at.norm, at.norm_class, at.norm, scale)
    yield call(
        "scaling", at.attended, at.attention_class, at.attention,
        attention(lambda f: lambda q, *rest, **k: f(q * math.sqrt(q.shape[-1]), *rest, **k)),
    )  # fmt: skip
    yield call("transposed", at.square, at.dense_class, at.square, flax_param("kernel", jnp.transpose))
    yield call(
        "gelu", at.activated, at.mlp_class, at.mlp, shadow(at.act[1], lambda m: FLAX_ACT2FN["gelu_new"])
    )  # fmt: skip
    yield call("bias", at.biased, at.dense_class, at.biased, flax_param("bias", jnp.zeros_like))

    def split(x: Any) -> Any:
        return _split(x.swapaxes(1, 2)).swapaxes(1, 2)

    yield call(
        "heads", at.attended, at.attention_class, at.attention,
        attention(lambda f: lambda q, k, *rest, **kw: f(split(q), split(k), *rest, **kw)),
    )  # fmt: skip
    if model == "llama":
        yield call(
            "rotary", at.attended, modeling_flax_llama.FlaxLlamaRotaryEmbedding, at.attention + ".rotary_emb",
            swap(at.flax, "apply_rotary_pos_emb", _flax_rotary),
        )  # fmt: skip
    if model != "vit":
        mask = shadow("causal_mask", lambda m: jnp.tril(jnp.ones_like(m.causal_mask), 1))
        yield call("mask", at.attended, at.attention_class, at.attention, mask)
    kernel = f"{at.biased}/kernel"
    yield call(
        "doubled parameter", kernel, at.dense_class, at.biased, flax_param("kernel", double), "parameter_grad"
    )  # fmt: skip
    yield fault("doubled activation", "activation_grad", stack + "/0[0]", plant=_flax_double_input(at, layer))
    yield fault("reduction", "activation_grad", "(model)", "lm_head", "classifier", "loss", reduction="sum")
    path = (layer + kernel).replace(".", "/")
    yield fault("stale", "parameter", path, change=(path, lambda p: p * OLDER))
    yield call(
        "cached", at.biased, at.dense_class, at.biased,
        flax_param("kernel", lambda p: jax.lax.stop_gradient(p * OLDER)),
    )  # fmt: skip
    square = f"{layer}{at.square}/kernel".replace(".", "/")
    yield fault("untransposed", "parameter", square, change=(square, jnp.transpose))


def _flax_rotary(rotate: Callable) -> Callable:
    """Keys are rotated first, then queries, here by the angles of the next position."""
    calls = itertools.count()

    def rotated(x: Any, sin: Any, cos: Any) -> Any:
        if next(calls) % 2 == 0:
            return rotate(x, sin, cos)
        return rotate(x, jnp.roll(sin, -1, 1), jnp.roll(cos, -1, 1))

    return rotated


def _flax_double_input(at: Layout, layer: str) -> Callable:
    @contextlib.contextmanager
    def plant(_: Any) -> Iterator[None]:
        original, place = at.block_class.__call__, tuple(layer.strip("/").split("/"))

        def __call__(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
            return original(self, double(x) if self.path == place else x, *args, **kwargs)

        with mock.patch.object(at.block_class, "__call__", __call__):
            yield

    return plant


FAULTS = [fault for model in LAYOUTS for make in (_torch, _flax) for fault in make(model)]
