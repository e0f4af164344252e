"""Quantizers with TransformerEngine's arguments and methods: each call is `diptych.torch.quantize` by their value."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch_frontend.tools import same

import diptych.te as te
import diptych.torch as dt
from diptych import common
from diptych.common import UnsupportedError
from diptych.te.common.recipe import CustomRecipe, DelayedScaling, Format

E4M3, E5M2 = te.DType.kFloat8E4M3, te.DType.kFloat8E5M2
QUANTIZERS = {
    "current": (te.Float8CurrentScalingQuantizer(E4M3, "cpu", force_pow_2_scales=True, amax_epsilon=1e-3),
                common.Float8CurrentScalingQuantizer(force_pow_2_scales=True, amax_epsilon=1e-3)),
    "block": (te.Float8BlockQuantizer(E5M2, rowwise=True, columnwise=True),
              common.Float8BlockQuantizer(fp8_dtype="float8_e5m2", block_scaling_dim=2)),
    "block 1": (te.Float8BlockQuantizer(fp8_dtype=E4M3, rowwise=True, columnwise=True, block_scaling_dim=1),
                common.Float8BlockQuantizer()),
    "mx": (te.MXFP8Quantizer(E4M3), common.MXFP8Quantizer()),
    "mx 2d": (te.MXFP8Quantizer(torch.float8_e4m3fn, with_2d_quantization=True),
              common.MXFP8Quantizer(with_2d_quantization=True)),
    "nvfp4": (te.NVFP4Quantizer(columnwise=False, row_scaled_nvfp4=True, nvfp4_use_4over6=False),
              common.NVFP4Quantizer(columnwise=False, row_scaled_nvfp4=True)),
    "nvfp4 rht": (te.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True), common.NVFP4Quantizer(with_rht=True)),
}  # fmt: skip


@pytest.mark.parametrize("name", QUANTIZERS)
def test_values_and_calls(name):
    made, value = QUANTIZERS[name]
    assert made.value == value and made.dtype.value == value.format.element
    x = torch.randn(128, 128).bfloat16()
    want = dt.quantize(x, value)
    for q in (made(x), made.quantize(x, dtype=torch.bfloat16)):
        assert isinstance(q, te.QuantizedTensor) and q.quantizer == value
        for buffer in value.buffer_names():
            same(getattr(q, buffer), getattr(want, buffer))
    empty = made.make_empty((128, 128), dtype=torch.bfloat16, device="cpu", requires_grad=True)
    assert empty.requires_grad and not empty.detach().dequantize().any() if made.columnwise_usage else True
    out = made.update_quantized(x, made.make_empty((128, 128), dtype=torch.bfloat16, device="cpu"))
    same(out.rowwise_data, want.rowwise_data)
    out = made.quantize(x, out=made.make_empty((128, 128), device="cpu"))
    same(out.rowwise_data, want.rowwise_data)
    assert out.dtype == torch.float32
    again = pickle.loads(pickle.dumps(made))
    assert again.value == value and repr(again) == repr(made)


def test_dtypes_by_torchs():
    for theirs, ours in te.constants.TE_DType.items():
        assert te.constants.TE_DType_To_Torch[ours] is theirs and f"torch.{ours.value}" == str(theirs)
    assert len(te.constants.TE_DType) == len(te.DType) - 1


def test_usage_changes_this_object_alone():
    made = te.MXFP8Quantizer(E4M3)
    kept, value = made.copy(), made.value
    made.set_usage(columnwise=False)
    assert made.get_usages() == {"rowwise": True, "columnwise": False} and value.columnwise and kept.columnwise_usage
    assert made(torch.randn(32, 32)).columnwise_data is None
    made.columnwise_usage, made.rowwise_usage = True, False
    assert made.get_usages() == {"rowwise": False, "columnwise": True}
    with pytest.raises(ValueError, match="at least one of rowwise and columnwise"):
        made.set_usage(columnwise=False)
    assert copy.deepcopy(made).value == made.value and made.with_2d_quantization is False


def test_a_given_scale():
    amax = torch.zeros(1)
    made = te.Float8Quantizer(torch.tensor(3.5), amax, E5M2)
    x = torch.randn(16, 48)
    want = dt.quantize(x, common.Float8Quantizer(fp8_dtype="float8_e5m2"), scale=torch.tensor([3.5]))
    same(made(x).rowwise_data, want.rowwise_data)
    assert amax.item() == x.abs().max().item()


def test_stochastic_rounding_draws_from_torchs_generator():
    made, x = te.NVFP4Quantizer(stochastic_rounding=True), torch.randn(32, 64)
    torch.manual_seed(1)
    one, two = made(x), made(x)
    torch.manual_seed(1)
    same(made(x).rowwise_data, one.rowwise_data)
    assert not torch.equal(one.rowwise_data, two.rowwise_data)


def test_refusals():
    x = torch.randn(32, 32)
    for make, words in (
        (lambda: te.Quantizer(rowwise=True, columnwise=True), "derives from diptych.common.Quantizer"),
        (lambda: te.NVFP4Quantizer(nvfp4_use_4over6=True), "nvfp4_use_4over6 must be False"),
        (lambda: te.NVFP4Quantizer(with_rht=True), "with_post_rht_amax must be equal to with_rht"),
        (lambda: te.NVFP4Quantizer(E4M3), "fp4_dtype must be"),
        (lambda: te.Float8CurrentScalingQuantizer(E4M3, "cpu", with_amax_reduction=True), "amax_groups"),
        (lambda: te.MXFP8Quantizer(E4M3).quantize(x, dtype=torch.float16), "dtype must be the tensor's"),
        (lambda: te.MXFP8Quantizer(E4M3).update_quantized(x, x, noop_flag=x), "noop_flag must be None"),
        (lambda: te.MXFP8Quantizer(E4M3).make_empty((32, 32), pin_memory=True), "pin_memory must be False"),
        (lambda: te.IdentityQuantizer()(x), "is an answer of a factory"),
        (lambda: te.IdentityQuantizer(dtype=torch.float16), "dtype must be None"),
        (lambda: te.DelayedScalingRequest(reduce_amax=False), "reduce_amax must be True"),
    ):
        with pytest.raises(UnsupportedError, match=words):
            make()
    with pytest.raises(TypeError, match=r"fp8_dtype must be a diptych\.te\.DType, got int"):
        te.MXFP8Quantizer(7)


def hybrid(role: te.QuantizerRole):
    """A factory as users of TransformerEngine write it: one format for each copy, by the role's names there."""
    if role.module_type != "linear":
        return te.IdentityQuantizer()
    if role.tensor_type == "weight":
        return te.MXFP8Quantizer(E4M3)
    if role.tensor_type == "grad_output" and role.name.endswith("last"):
        return te.DelayedScalingRequest()
    return te.HybridQuantizer(
        rowwise_quantizer=te.MXFP8Quantizer(E4M3, columnwise=False),
        columnwise_quantizer=te.Float8CurrentScalingQuantizer(E5M2, "cpu", rowwise=False),
    )


def test_factories_return_them():
    recipe = CustomRecipe(qfactory=hybrid, fp8_format=Format.HYBRID)
    role = te.QuantizerRole(module_type="layernorm_mlp", tensor_type="input", name="a")
    mx, current = common.MXFP8Quantizer(), common.Float8CurrentScalingQuantizer(fp8_dtype="float8_e5m2")
    assert recipe.quantizer(role.replace(tensor="weight")) == recipe.quantizer(role.replace(gemm="fprop")) == mx
    assert recipe.quantizer(role.replace(gemm="wgrad")) == current
    assert recipe.quantizer(role.replace(tensor="grad_output", gemm="dgrad")) == mx
    last = role.replace(tensor="grad_output", name="last")
    assert recipe.quantizer(last) == common.DelayedScaling().quantizer(last) == DelayedScaling().quantizer(last)
    assert recipe.quantizer(role.replace(module="grouped_linear")) is None

    def alike(role):
        if role.tensor == "weight" or role.gemm in ("fprop", "dgrad"):
            return mx
        return current

    layer = te.Linear(64, 64, device="cpu")
    grads = []
    for r in (CustomRecipe(hybrid), common.CustomRecipe(alike)):
        with te.autocast(recipe=r):
            layer(torch.ones(32, 64).cumsum(0)).square().sum().backward()
        grads.append(layer.weight.grad)
        layer.weight.grad = None
    assert torch.equal(*grads)
