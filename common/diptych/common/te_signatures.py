"""Arguments of TransformerEngine's modules and functions, versions 2.16 to 2.20, in their order, with their defaults.

The names and values are facts about that library's interface. `REQUIRED` stands where an argument has no default.
Arguments that came after 2.16 are marked with the version; an older caller does not know them.
"""

from __future__ import annotations

from typing import Any, Final

REQUIRED: Final[Any] = type("REQUIRED", (), {"__repr__": lambda _: "REQUIRED"})()

_DEVICE = "cuda"
_LINEAR = {
    "in_features": REQUIRED, "out_features": REQUIRED, "sequence_parallel": False, "fuse_wgrad_accumulation": False,
    "tp_group": None, "tp_size": 1, "get_rng_state_tracker": None, "rng_tracker_name": None, "init_method": None,
    "bias": True, "return_bias": False, "params_dtype": None, "parallel_mode": None,
}  # fmt: skip
_NORM = {
    "normalized_shape": REQUIRED, "eps": 1e-5, "sequence_parallel": None, "params_dtype": None,
    "zero_centered_gamma": False, "hidden_size": None, "device": None, "dtype": None, "sm_margin": 0,
}  # fmt: skip
_INPUT = {"inp": REQUIRED, "is_first_microbatch": None}
_PROBS = {"inp": REQUIRED, "probs": REQUIRED}

SIGNATURES: dict[str, dict[str, Any]] = {
    "Linear": {
        **_LINEAR, "parameters_split": None, "device": _DEVICE, "ub_overlap_ag": False, "ub_overlap_rs": False,
        "ub_overlap_rs_dgrad": False, "ub_bulk_dgrad": False, "ub_bulk_wgrad": False, "ub_name": None,
        "delay_wgrad_compute": False, "symmetric_ar_type": None, "save_original_input": False, "name": None,
    },
    "Linear.forward": {**_INPUT, "fp8_output": False, "fp8_grad": False},
    "LayerNormLinear": {
        "in_features": REQUIRED, "out_features": REQUIRED, "eps": 1e-5, "sequence_parallel": False,
        "fuse_wgrad_accumulation": False, "tp_group": None, "tp_size": 1, "get_rng_state_tracker": None,
        "init_method": None, "bias": True, "normalization": "LayerNorm", "return_bias": False, "params_dtype": None,
        "parallel_mode": None, "return_layernorm_output": False, "return_layernorm_output_gathered": False,
        "parameters_split": None, "zero_centered_gamma": False, "device": _DEVICE, "ub_overlap_ag": False,
        "ub_overlap_rs": False, "ub_overlap_rs_dgrad": False, "ub_bulk_wgrad": False, "ub_bulk_dgrad": False,
        "ub_name": None, "delay_wgrad_compute": False, "symmetric_ar_type": None, "name": None,
    },
    "LayerNormLinear.forward": {**_INPUT, "fp8_output": False, "fp8_grad": False},
    "LayerNormMLP": {
        "hidden_size": REQUIRED, "ffn_hidden_size": REQUIRED, "eps": 1e-5, "sequence_parallel": False,
        "return_bias": False, "get_rng_state_tracker": None, "tp_group": None, "tp_size": 1, "init_method": None,
        "bias": True, "normalization": "LayerNorm", "activation": "gelu", "activation_params": None,
        "output_layer_init_method": None, "fuse_wgrad_accumulation": False, "params_dtype": None,
        "return_layernorm_output": False, "return_layernorm_output_gathered": False, "seq_length": None,
        "micro_batch_size": None, "set_parallel_mode": False, "zero_centered_gamma": False, "device": _DEVICE,
        "ub_overlap_ag": False, "name": None, "ub_overlap_rs": False, "ub_overlap_rs_dgrad": False,
        "ub_bulk_dgrad": False, "ub_bulk_wgrad": False, "delay_wgrad_compute": False, "symmetric_ar_type": None,
        "checkpoint": False,
    },
    "LayerNormMLP.forward": _INPUT,
    "GroupedLinear": {
        "num_gemms": REQUIRED, **_LINEAR, "device": _DEVICE, "ub_overlap_rs": False, "ub_overlap_ag": False,
        "ub_name": None, "delay_wgrad_compute": False, "save_original_input": False, "single_grouped_weight": False,
        "single_grouped_bias": False, "name": None,
        "use_grouped_tensor": None,  # 2.19
    },
    "GroupedLinear.forward": {
        "inp": REQUIRED, "m_splits": REQUIRED, "is_first_microbatch": None,
        "out": None, "dgrad_out": None,  # 2.18
    },
    "LayerNorm": _NORM,
    "RMSNorm": _NORM,
    "make_graphed_callables": {
        "modules": REQUIRED, "sample_args": REQUIRED, "num_warmup_iters": 3, "allow_unused_input": False,
        "sample_kwargs": None, "fp8_enabled": None, "fp8_calibrating": None, "fp8_recipe": None, "fp8_group": None,
        "fp8_weight_caching": None, "enabled": None, "calibrating": None, "recipe": None, "amax_reduction_group": None,
        "cache_quantized_params": None, "_order": None, "_num_layers_per_chunk": None, "pool": None,
        "retain_graph_in_backward": False, "_reuse_graph_input_output_buffers": False, "pre_warmup_hook": None,
        "post_warmup_hook": None,
        "clone_param_grads_on_return": True, "capture_time_hooks": None,  # 2.19
    },
    "checkpoint": {
        "distribute_saved_activations": False, "get_rng_state_tracker": None, "tp_group": None, "use_reentrant": True,
    },
    "autocast": {
        "enabled": True, "calibrating": False, "recipe": None, "amax_reduction_group": None, "_graph": False,
    },
    "fp8_autocast": {
        "enabled": True, "calibrating": False, "fp8_recipe": None, "fp8_group": None, "_graph": False,
    },
    "quantized_model_init": {"enabled": True, "recipe": None, "preserve_high_precision_init_val": False},
    "fp8_model_init": {"enabled": True, "recipe": None, "preserve_high_precision_init_val": False},
    "moe_permute": {
        "inp": REQUIRED, "routing_map": REQUIRED, "num_out_tokens": REQUIRED, "max_token_num": -1, "map_type": "mask",
    },
    "moe_permute_with_probs": {**_PROBS, "routing_map": REQUIRED, "num_out_tokens": REQUIRED},
    "moe_permute_and_pad_with_probs": {
        **_PROBS, "routing_map": REQUIRED, "tokens_per_expert": REQUIRED, "align_size": REQUIRED,
    },
    "moe_unpermute": {
        "inp": REQUIRED, "row_id_map": REQUIRED, "merging_probs": None, "restore_shape": None, "map_type": "mask",
        "probs": None, "pad_offsets": None,
    },
    "moe_sort_chunks_by_index": {"inp": REQUIRED, "split_sizes": REQUIRED, "sorted_index": REQUIRED},
    "moe_sort_chunks_by_index_with_probs": {**_PROBS, "split_sizes": REQUIRED, "sorted_index": REQUIRED},
    "Float8Quantizer": {
        "scale": REQUIRED, "amax": REQUIRED, "fp8_dtype": REQUIRED, "rowwise": True, "columnwise": True,
    },
    "Float8CurrentScalingQuantizer": {
        "fp8_dtype": REQUIRED, "device": REQUIRED, "rowwise": True, "columnwise": True, "use_existing_amax": False,
        "with_amax_reduction": False, "amax_reduction_group": None, "force_pow_2_scales": False, "amax_epsilon": 0.0,
        "scale": None, "amax": None,
    },
    "MXFP8Quantizer": {
        "fp8_dtype": REQUIRED, "rowwise": True, "columnwise": True,
        "with_2d_quantization": False,  # 2.19
    },
    "Float8BlockQuantizer": {
        "fp8_dtype": REQUIRED, "rowwise": REQUIRED, "columnwise": REQUIRED, "amax_epsilon": 0.0,
        "force_pow_2_scales": True, "block_scaling_dim": 2,
    },
    "NVFP4Quantizer": {
        "fp4_dtype": "float4_e2m1fn", "rowwise": True, "columnwise": True, "with_amax_reduction": False,
        "amax_reduction_group": None, "with_rht": False, "with_post_rht_amax": False, "with_2d_quantization": False,
        "stochastic_rounding": False, "row_scaled_nvfp4": False,
        "nvfp4_use_4over6": False, "nvfp4_e4m3_max": 448, "nvfp4_4over6_err_mode": "MAE",  # 2.17
        "with_random_sign_mask": True,
    },
}  # fmt: skip
"""By the name of a class or function, or a class's name and ".forward": each argument's default value, by its name."""
