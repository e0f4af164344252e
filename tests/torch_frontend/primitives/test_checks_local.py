"""Public ops run on local tensors: each tensor that a user gives as a DTensor raises an error that names
`local_map`."""

from __future__ import annotations

import inspect
from typing import Any

import torch

import diptych.torch as dt
from diptych.common import (
    Float8CurrentScaling,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    NVFP4Quantizer,
)
from torch_frontend.ranks import needs_gloo
from torch_frontend.tools import normal

pytestmark = needs_gloo
WORLD_SIZES = (1,)
T, E, H = 32, 4, 64
RECIPE, QUANTIZER = Float8CurrentScaling(), Float8CurrentScalingQuantizer()
TAKE_NO_TENSORS = {
    "autocast", "check_states", "checkpoint", "checkpoint_contexts", "convert", "dry_run", "fp8_autocast",
    "fp8_model_init", "get_autocast_recipe", "get_default_recipe", "hold", "is_autocast_enabled",
    "is_bf16_available", "is_fp8_available", "is_fp8_block_scaling_available", "is_mxfp8_available",
    "is_nvfp4_available", "make_graphed_callables", "plain_state_dict", "prepare", "prepare_weights",
    "quantized_model_init", "recognize_pipelines", "report", "rng_state", "seed_rng", "te_state_dict", "unhold",
}  # fmt: skip


def calls() -> dict[str, tuple[Any, dict[str, Any]]]:
    """Each public op, and arguments by which it runs."""
    x, one = normal("x", (T, H)), torch.ones(1)
    q, stack = dt.quantize(x, QUANTIZER), dt.quantize_stack(normal("w", (E, H, H)), QUANTIZER)
    offsets = torch.arange(E + 1, dtype=torch.int32) * (T // E)
    mask = torch.arange(T)[:, None] % E == torch.arange(E)
    row_map, probs, rng = dt.moe_map(mask), torch.rand(T, E), dt.rng_state(1)
    module = {"input": x}
    return {
        "amax": (dt.amax, {"x": x}),
        "bias_grad": (dt.bias_grad, {"dy": x}),
        "dequantize": (dt.dequantize, {"q": q}),
        "gemm": (dt.gemm, {"a": q, "b": q, "bias": torch.ones(T)}),
        "gemm_into": (dt.gemm_into, {"acc": torch.zeros(T, T), "a": q, "b": q, "bias": torch.ones(T)}),
        "grouped_bias_grad": (dt.grouped_bias_grad, {"dy": x, "offsets": offsets}),
        "grouped_gemm": (dt.grouped_gemm, {"a": q, "b": stack, "offsets": offsets, "bias": torch.ones(E, H)}),
        "grouped_linear": (dt.grouped_linear, {
            "x": x, "weight": normal("w", (E, H, H)), "bias": torch.ones(E, H), "offsets": offsets, "recipe": RECIPE,
            "rng": rng,
        }),
        "hash": (dt.hash, {"x": x}),
        "linear": (dt.linear, {"x": x, "weight": x, "bias": torch.ones(T), "recipe": RECIPE, "rng": rng}),
        "moe_map": (dt.moe_map, {"routing_map": mask}),
        "moe_permute": (dt.moe_permute, {"inp": x, "routing_map": mask}),
        "moe_permute_with_probs": (dt.moe_permute_with_probs, {"inp": x, "probs": probs, "routing_map": mask}),
        "moe_permute_and_pad_with_probs": (dt.moe_permute_and_pad_with_probs, {
            "inp": x, "probs": probs, "routing_map": mask, "tokens_per_expert": torch.full((E,), T // E),
        }),
        "moe_permute_and_quantize": (dt.moe_permute_and_quantize, {
            "inp": x, "row_map": row_map, "quantizer": QUANTIZER, "probs": probs, "amax": one,
        }),
        "moe_sort_chunks_by_index": (dt.moe_sort_chunks_by_index, {
            "inp": x, "split_sizes": torch.full((E,), T // E), "sorted_index": torch.arange(E),
        }),
        "moe_sort_chunks_by_index_with_probs": (dt.moe_sort_chunks_by_index_with_probs, {
            "inp": x, "probs": torch.rand(T), "split_sizes": torch.full((E,), T // E), "sorted_index": torch.arange(E),
        }),
        "moe_unpermute": (dt.moe_unpermute, {
            "inp": x, "row_id_map": row_map.row_id_map, "merging_probs": probs,
            "pad_offsets": torch.zeros(E, dtype=torch.int32),
        }),
        "quantize": (dt.quantize, {"x": x, "quantizer": QUANTIZER, "amax": one}),
        "quantize by a scale": (dt.quantize, {"x": x, "quantizer": Float8Quantizer(), "scale": one}),
        "quantize stochastically": (dt.quantize, {
            "x": x, "quantizer": NVFP4Quantizer(columnwise=False, stochastic_rounding=True), "rng": rng,
        }),
        "quantize_stack": (dt.quantize_stack, {
            "x": normal("w", (E, H, H)), "quantizer": QUANTIZER, "amax": torch.ones(E),
        }),
        "scale_update": (dt.scale_update, {
            "history": torch.ones(1, 4), "scale": torch.ones(1), "reduced": one, "amax": one,
        }),
        "to_tensor_proto": (dt.to_tensor_proto, {"t": x}),
        "Linear": (dt.Linear(H, H), module),
        "LayerNormLinear": (dt.LayerNormLinear(H, H), module),
        "LayerNormMLP": (dt.LayerNormMLP(H, H), module),
        "GroupedLinear": (dt.GroupedLinear(E, H, H), {"inp": x, "m_splits": [T // E] * E}),
    }  # fmt: skip


def on_rank(rank: int, groups: Any) -> dict[str, str]:
    """The errors of each op with each of its tensors as a DTensor."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    said = {}
    for name, (op, given) in calls().items():
        with dt.autocast(recipe=RECIPE):
            op(**given)
        for arg, t in given.items():
            if isinstance(t, torch.Tensor):
                quantized = isinstance(t, dt.QuantizedTensor | dt.QuantizedStack)
                placed = distribute_tensor(t.dequantize() if quantized else t, mesh, [Replicate()])
                try:
                    with dt.autocast(recipe=RECIPE):
                        op(**{**given, arg: placed})
                    said[f"{name}: {arg}"] = "no error"
                except Exception as error:
                    said[f"{name}: {arg}"] = f"{type(error).__name__}: {error}"
    return said


def test_each_tensor_of_each_op(ranks):
    assert len(ranks[0]) > 50
    for what, text in ranks[0].items():
        assert text.startswith("UnsupportedError") and "local_map" in text, (what, text)


def test_every_public_function_is_listed():
    functions = {name for name in dt.__all__ if inspect.isfunction(getattr(dt, name))}
    listed = {op.__name__ for op, _ in calls().values() if inspect.isfunction(op)}
    assert functions - TAKE_NO_TENSORS == listed
