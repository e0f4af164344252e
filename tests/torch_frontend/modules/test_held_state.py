"""Held weights in checkpoints: as plain tensors, as others publish them, and by torch's own means."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

import diptych.torch as dt
from diptych.common import (
    CheckpointError,
    CheckpointWarning,
    CustomRecipe,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from diptych.torch.modules import held_state
from torch_frontend.held import KINDS, buffers, layer, requantized, same_buffers
from torch_frontend.layer_cases import NAMED
from torch_frontend.tools import RECIPE_NAMES, normal, same

BLOCK, MX = Float8BlockScaling(), MXFP8BlockScaling()


@pytest.fixture(autouse=True)
def _fresh_warnings(monkeypatch):
    monkeypatch.setattr(held_state, "_warned", set())


def _square_mx(role: Any) -> MXFP8Quantizer:
    return MXFP8Quantizer(with_2d_quantization=True)


def _square_nv(role: Any) -> NVFP4Quantizer:
    return NVFP4Quantizer(with_2d_quantization=True)


HELD: dict[str, Any] = {name: NAMED[name] for name in RECIPE_NAMES}
HELD |= {"mxfp8 square": CustomRecipe(_square_mx), "nvfp4 square": CustomRecipe(_square_nv)}


# --- plain tensors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", HELD)
def test_plain_tensors_come_back(name, kind):
    """Copies that one determines are written once, and are made of it in bits."""
    ours, other, late = (layer(kind, HELD[name]) for _ in range(3))
    entries = dt.plain_state_dict(ours)
    assert all(type(t) is torch.Tensor for t in entries.values())
    assert {k for k in entries if k.startswith("weight")} >= {"weight", "weight_scale_inv"}
    assert ("weight_columnwise_data" in entries) == (name == "mxfp8")  # the one without square blocks
    with warnings.catch_warnings():
        warnings.simplefilter("error", CheckpointWarning)
        assert not any(other.load_state_dict(entries))
        late.load_state_dict(entries, assign=True)
        assert dt.plain_state_dict(ours.state_dict()).keys() == entries.keys()
    for m in (other, late):
        same_buffers(m.weight, buffers(ours.weight))
        assert isinstance(m.weight, torch.nn.Parameter) and m.weight.requires_grad


@pytest.mark.parametrize("shape", ((40, 72), (128, 300), (257, 129)))
def test_columnwise_copies_of_ragged_weights(shape):
    for recipe in (BLOCK, Float8CurrentScaling(), CustomRecipe(_square_mx)):
        with dt.quantized_model_init(recipe=recipe):
            ours, other = (dt.Linear(shape[1], shape[0]) for _ in range(2))
        entries = dt.plain_state_dict(ours)
        assert "weight_columnwise_data" not in entries
        other.load_state_dict(entries)
        same_buffers(other.weight, buffers(ours.weight))


def test_safetensors(tmp_path):
    files = pytest.importorskip("safetensors.torch")
    model, other = (torch.nn.Sequential(layer("tensor", BLOCK), layer("stack", MX)) for _ in range(2))
    with pytest.raises(TypeError, match=r"takes the plain tensors of diptych\.torch\.plain_state_dict\(model\)"):
        files.save_file(model.state_dict(), tmp_path / "refused")
    files.save_file(dt.plain_state_dict(model), tmp_path / "model")
    other.load_state_dict(files.load_file(tmp_path / "model"))
    for a, b in zip(model, other, strict=True):
        same_buffers(b.weight, buffers(a.weight))


def test_names_that_meet():
    ours = layer()
    ours.register_buffer("weight_scale_inv", torch.ones(1))
    with pytest.raises(ValueError, match="'weight_scale_inv' names both a tensor and a part of 'weight'"):
        dt.plain_state_dict(ours)


# --- published checkpoints -------------------------------------------------------------------------------------------


def published(scales: str, n: int = 256, k: int = 384, dtype: Any = torch.float8_e4m3fn) -> tuple[dict[str, Any], Any]:
    """(entries, values float32) of a weight with scales of that shape."""
    data = torch.randn(n, k).mul(40).to(dtype)
    shape = {"tensor": (), "one": (1,), "rows": (n, 1), "row": (n,), "1x128": (n, -(-k // 128))}
    shape["128x128"] = (-(-n // 128), -(-k // 128))
    scale = torch.rand(shape[scales]) * 0.01 + 1e-4
    if scales == "row":
        spread = scale[:, None]
    elif scales in ("tensor", "one", "rows"):
        spread = scale
    else:
        spread = scale.repeat_interleave(128, 1)[:, :k]
        spread = spread.repeat_interleave(128, 0)[:n] if scales == "128x128" else spread
    return {"weight": data, "weight_scale_inv": scale}, data.float() * spread


SCALES = ("tensor", "one", "rows", "row", "1x128", "128x128")


@pytest.mark.parametrize("assign", (False, True))
@pytest.mark.parametrize("scales", SCALES)
def test_published_into_high_precision(scales, assign):
    """The values, with a warning; never the payload alone."""
    for n, k in ((256, 384), (200, 136)):
        entries, want = published(scales, n, k)
        for dtype in (torch.float32, torch.bfloat16):
            ours = dt.Linear(k, n, bias=False, dtype=dtype)
            held_state._warned.clear()
            with pytest.warns(CheckpointWarning, match="weight is quantized in the checkpoint and in high"):
                assert not any(ours.load_state_dict(entries, assign=assign))
            assert type(ours.weight) is torch.nn.Parameter
            same(ours.weight, want.to(dtype))
    other = {"weight": entries["weight"], "weight_scale": entries["weight_scale_inv"]}
    ours.load_state_dict(other)
    same(ours.weight, want.to(dtype))


@pytest.mark.parametrize("assign", (False, True))
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("name", ("fp8-block", "fp8-current", "mxfp8"))
def test_published_into_held_weights(name, scales, assign):
    """As it is where the layout fits, else quantized again, with a warning."""
    entries, values = published(scales)
    for meta in (False, True):
        if meta and not assign:
            continue
        with dt.quantized_model_init(recipe=NAMED[name]):
            ours = dt.Linear(384, 256, bias=False, device="meta" if meta else "cpu")
        held_state._warned.clear()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert not any(ours.load_state_dict(entries, assign=assign))
        fits = (name, scales) in (("fp8-block", "128x128"), ("fp8-current", "tensor"), ("fp8-current", "one"))
        assert [w.category for w in said] == ([] if fits else [CheckpointWarning])
        assert isinstance(ours.weight, dt.QuantizedParameter)
        if not fits:
            assert "weight is not quantized in the checkpoint as by" in str(said[0].message)
            same_buffers(ours.weight, requantized(ours.weight, values))
            continue
        same(ours.weight.rowwise_data, entries["weight"])
        same(ours.weight.rowwise_scale_inv, entries["weight_scale_inv"].reshape(ours.weight.rowwise_scale_inv.shape))
        same(ours.weight.columnwise_data, entries["weight"].t().contiguous())
        same(ours.weight.dequantize(), values)
        x = normal("x", (32, 384)).requires_grad_()
        with dt.autocast(recipe=NAMED[name]):
            ours(x).sum().backward()
        assert x.grad is not None


def test_published_experts():
    """One by one, as they are published, into a stack."""
    parts = [published("128x128", 128, 256) for _ in range(3)]
    entries = {f"weight{g}": e["weight"] for g, (e, _) in enumerate(parts)}
    entries |= {f"weight{g}_scale_inv": e["weight_scale_inv"] for g, (e, _) in enumerate(parts)}
    with dt.quantized_model_init(recipe=BLOCK):
        held = dt.GroupedLinear(3, 256, 128, bias=False)
    plain = dt.GroupedLinear(3, 256, 128, bias=False)
    held.load_state_dict(entries)
    same(held.weight.rowwise_data, torch.stack([e["weight"] for e, _ in parts]))
    with pytest.warns(CheckpointWarning):
        plain.load_state_dict(entries)
    for m in (held, plain):
        same(m.weight.dequantize() if m is held else m.weight, torch.stack([v for _, v in parts]))


def test_scales_in_other_dtypes():
    entries, _ = published("128x128")
    for dtype in (torch.bfloat16, torch.float8_e8m0fnu):
        scale = entries["weight_scale_inv"].to(dtype)
        ours = layer_of(BLOCK)
        ours.load_state_dict({"weight": entries["weight"], "weight_scale_inv": scale})
        same(ours.weight.rowwise_scale_inv, scale.float())
    source = layer_of(MX)
    entries = dt.plain_state_dict(source)
    ours = layer_of(MX)
    as_bytes = {k: t.view(torch.uint8) if k.endswith("scale_inv") else t for k, t in entries.items()}
    ours.load_state_dict(as_bytes)
    same_buffers(ours.weight, buffers(source.weight))


def layer_of(recipe: Any) -> Any:
    with dt.quantized_model_init(recipe=recipe):
        return dt.Linear(384, 256, bias=False)


def test_what_no_weight_can_be_made_of():
    entries, _ = published("128x128")
    payload, one = entries["weight"], torch.ones(1)
    for bad, match in (
        ({"weight": payload, "weight_scale_inv": torch.ones(3, 5)}, r"scales \[3, 5\] do not divide a payload"),
        ({"weight": payload[:128], "weight_scale_inv": torch.ones(1, 3)}, r"is \[256, 384\] here and \[128, 384\]"),
        ({"weight": payload.to(torch.int8), "weight_scale": one}, "needs a payload in float8"),
        ({"weight_scale_inv": torch.ones(2, 3)}, "needs a payload in float8"),
    ):
        for ours in (dt.Linear(384, 256, bias=False), layer_of(BLOCK)):
            before = ours.weight.detach().clone()
            with pytest.raises(CheckpointError, match=match):
                ours.load_state_dict(bad, strict=False)
            assert torch.equal(ours.weight.detach(), before)


def test_a_held_checkpoint_in_high_precision_and_in_other_formats():
    source = layer("tensor", MX)
    plain, block = dt.Linear(96, 64, bias=False), layer("tensor", BLOCK)
    with pytest.warns(CheckpointWarning, match="in high precision here"):
        plain.load_state_dict(source.state_dict())
    same(plain.weight, source.weight.dequantize())
    for assign in (False, True):
        held_state._warned.clear()
        with pytest.warns(CheckpointWarning, match="quantized again"):
            block.load_state_dict(source.state_dict(), assign=assign)
        same_buffers(block.weight, requantized(block.weight, source.weight.dequantize()))


# --- torch.distributed.checkpoint ------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", KINDS)
def test_distributed_checkpoints(tmp_path, kind):
    source = layer(kind)
    dcp.save(source.state_dict(), checkpoint_id=tmp_path / "held", no_dist=True)
    other = layer(kind)
    state = other.state_dict()
    dcp.load(state, checkpoint_id=tmp_path / "held", no_dist=True)  # in place, where the weight is
    same_buffers(other.weight, buffers(source.weight))
    other.load_state_dict(state)
    third = layer(kind)
    state = get_model_state_dict(third)
    dcp.load(state, checkpoint_id=tmp_path / "held", no_dist=True)
    set_model_state_dict(third, state)
    same_buffers(third.weight, buffers(source.weight))
    high = {"weight": torch.randn(source.weight.shape)}
    dcp.save(high, checkpoint_id=tmp_path / "high", no_dist=True)
    state = other.state_dict()
    dcp.load(state, checkpoint_id=tmp_path / "high", no_dist=True)
    same_buffers(other.weight, requantized(other.weight, high["weight"]))


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_states_are_left_out_or_alone(name):
    """Without states, the entries of the model before `convert` remain; a buffer of the same name elsewhere is none."""
    net, other = (torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)) for _ in range(2))
    net.register_buffer("rng_state", torch.zeros(1))
    before = net.state_dict()
    dt.convert(net, NAMED[name], verbose=False)
    weights, states = dt.plain_state_dict(net, "weights"), dt.plain_state_dict(net, "states")
    assert list(weights) == list(before)
    for key, t in before.items():
        same(weights[key], t, key)
    assert bool(states) == (name in ("fp8-delayed", "nvfp4"))
    assert weights.keys() | states.keys() == net.state_dict().keys() and not weights.keys() & states.keys()

    other = dt.convert(
        torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)), NAMED[name], verbose=False
    )
    assert not other.load_state_dict(states, strict=False).unexpected_keys
    for key, t in dt.plain_state_dict(other, "states").items():
        same(t, states[key], key)


def test_parts_are_checked():
    with pytest.raises(TypeError, match="plain_state_dict: parts='weights' needs the module, got dict, whose keys"):
        dt.plain_state_dict({}, "weights")
    with pytest.raises(
        ValueError, match="plain_state_dict: parts must be one of 'all', 'weights', 'states', got False"
    ):
        dt.plain_state_dict(torch.nn.Linear(2, 2), False)  # type: ignore[arg-type]
