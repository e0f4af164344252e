"""Models that are filled from safetensors files, tensor by tensor: bits, names, what is missing, and the memory."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import diptych.torch as dt
from diptych.common import MXFP8BlockScaling, MXFP8Quantizer, NVFP4BlockScaling
from diptych.common.errors import CheckpointError, CheckpointWarning
from diptych.torch.modules import held_checkpoint
from quantizers import quantizer
from torch_frontend.held import buffers, same_buffers
from torch_frontend.layer_cases import NAMED, dtype_of
from torch_frontend.modules.test_convert_experts import Experts
from torch_frontend.tools import RECIPE_NAMES, normal, same

MX = MXFP8BlockScaling()


class Model(nn.Module):
    """A language model with a tie, a persistent and an unsaved buffer, and stacks of experts."""

    def __init__(self, dtype: Any = torch.float32, device: Any = "cpu", tied: bool = True):
        super().__init__()
        kw = {"dtype": dtype, "device": device}
        self.embed, self.norm = nn.Embedding(48, 128, **kw), nn.LayerNorm(128, **kw)
        self.up, self.down = nn.Linear(128, 400, **kw), nn.Linear(400, 128, bias=False, **kw)
        self.head = nn.Linear(128, 48, bias=False, **kw)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.arange(3, device=device))
        self.register_buffer("angles", torch.empty(4, device=device), persistent=False)
        self._init_weights(self)

    def _init_weights(self, module):
        if module is self:
            self.angles.copy_(torch.linspace(0, 1, 4))

    def forward(self, tokens):
        x = self.norm(self.embed(tokens) + self.angles.sum().to(self.norm.weight.dtype))
        return self.head(self.down(self.up(x).relu()))


def cast(model: Model, dtype: torch.dtype) -> Model:
    """A model with its parameters alone in another dtype."""
    angles = model.angles
    model.to(dtype).angles = angles
    return model


def same_models(got: nn.Module, want: nn.Module) -> None:
    tensors = [dict([*m.named_parameters(remove_duplicate=False), *m.named_buffers()]) for m in (got, want)]
    assert tensors[0].keys() == tensors[1].keys()
    for name, t in tensors[0].items():
        other = tensors[1][name]
        assert type(t) is type(other) and t.requires_grad == other.requires_grad, name
        if isinstance(t, dt.QuantizedParameter):
            assert t.dtype == other.dtype and t.quantizer == other.quantizer
            same_buffers(t, buffers(other))
        elif name.endswith("rng_state"):
            assert t.shape == other.shape and not t.is_meta  # drawn anew for each
        else:
            same(t, other, name)


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(held_checkpoint, "PART", 1 << 14)  # less than a weight


@pytest.mark.parametrize("names", (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")), ids=str)
def test_experts_that_lie_one_by_one_fill_their_stacks(names, tmp_path, small_parts):
    """Each expert's gate and up follow each other in the stack. In high precision, and as payloads beside scales."""
    gate, up, down = names
    model = nn.ModuleDict({"moe": Experts()})
    held = dt.hold(copy.deepcopy(model), MX, verbose=False)

    def split(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        made = {n: t for n, t in state.items() if not n.endswith("_proj")}
        for e in range(model.moe.down_proj.shape[0]):
            made[f"moe.{e}.{gate}.weight"], made[f"moe.{e}.{up}.weight"] = state["moe.gate_up_proj"][e].chunk(2)
            made[f"moe.{e}.{down}.weight"] = state["moe.down_proj"][e]
        return {n: t.clone() for n, t in made.items()}

    for state in (model.state_dict(), dt.plain_state_dict(held)):
        save_file(split(state), tmp_path / "x.safetensors")
        meta = copy.deepcopy(model).to("meta")
        meta.moe.is_transposed = False
        dt.hold(meta, MX, checkpoint=tmp_path, verbose=False)
        for p, want in zip(meta.parameters(), held.parameters(), strict=True):
            same_buffers(p, buffers(want))
    lacking = split(model.state_dict())
    lacking.pop(f"moe.1.{up}.weight")
    save_file(lacking, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match=rf"lacks moe.gate_up_proj and has moe.0.{gate}.weight"):
        dt.hold(copy.deepcopy(model), MX, checkpoint=tmp_path)


@pytest.mark.filterwarnings("ignore::diptych.torch.ConvertWarning")
@pytest.mark.parametrize("inference", (False, True))
@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_bits_are_those_of_the_model_in_memory(name, inference, tmp_path, small_parts):
    """Files that `plain_state_dict` wrote with states, and models in another dtype, have them too."""
    recipe, dtype = NAMED[name], getattr(torch, dtype_of(name))
    made = Model()
    save_file({n: t for n, t in made.state_dict().items() if n != "head.weight"}, tmp_path / "model.safetensors")
    want = dt.hold(cast(made, dtype), recipe, inference=inference, verbose=False)
    loaded = dt.hold(Model(dtype, "meta"), recipe, checkpoint=tmp_path, inference=inference, verbose=False)
    same_models(loaded, want)
    assert loaded.head.weight is loaded.embed.weight
    tokens = torch.arange(32)
    for _ in range(2):
        for m in (loaded, want):
            dt.seed_rng(m, 7)
            if not inference:
                m(tokens).sum().backward()
    with torch.no_grad():
        same(loaded(tokens), want(tokens))
    saved = {n: t.clone() for n, t in dt.plain_state_dict(loaded).items() if n != "head.weight"}
    save_file(saved, tmp_path / "held.safetensors")
    again = dt.hold(
        Model(dtype, "meta"), recipe, checkpoint=tmp_path / "held.safetensors", inference=inference, verbose=False
    )
    for (n, t), (other_n, other) in zip(again.state_dict().items(), loaded.state_dict().items(), strict=True):
        assert n == other_n
        same_buffers(t, buffers(other)) if isinstance(t, dt.QuantizedTensor) else same(t, other, n)


@pytest.mark.parametrize("options", ({}, {"columnwise": False}, {"rowwise": False}), ids=str)
@pytest.mark.parametrize("form", ("fp8_e4m3_tensor", "fp8_e4m3_1x128", "fp8_e4m3_128x128", "mxfp8_e4m3", "nvfp4"))
def test_parts_make_the_whole(form, options, small_parts):
    """Tensors of every format whose last part is ragged, and stacks."""
    made = quantizer(form, **options)
    for shape in ((16 * 41, 96), (3, 16 * 17, 96)):
        x = normal("parts", shape)
        want = (dt.quantize_stack if len(shape) == 3 else dt.quantize)(x, made)
        got = held_checkpoint.empty_held(x.shape, x.dtype, made, x.device)
        flat, reads = x.view(-1, 96), []
        held_checkpoint.fill(got, lambda a, b, flat=flat, reads=reads: reads.append((a, b)) or flat[a:b])
        same_buffers(got, buffers(want))
        assert max(b - a for a, b in reads) * 96 * 4 <= 128 * 96 * 4 and len(reads) > 2 * len(shape) - 3


class Halved(MXFP8Quantizer):
    """A quantizer that looks at the whole tensor."""

    def quantize_impl(self, x, quantize):
        return quantize(x / x.abs().amax(), MXFP8Quantizer(rowwise=self.rowwise, columnwise=self.columnwise))


def test_a_users_quantizer_gets_the_whole_tensor(small_parts):
    x = normal("parts", (512, 96))
    made = Halved()
    got = held_checkpoint.empty_held(x.shape, x.dtype, made, x.device)
    held_checkpoint.fill(got, lambda a, b: x[a:b])
    same_buffers(got, buffers(dt.quantize(x, made)))


def test_several_files_renamed_and_experts(tmp_path):
    model = nn.ModuleDict({"moe": Experts(), "out": nn.Linear(64, 32)})
    state = {f"base.{n}": t for n, t in model.state_dict().items()}
    places = {}
    for i, (n, t) in enumerate(state.items()):
        places[n] = f"part-{i}.safetensors"
        save_file({n: t, "unused": torch.zeros(1)}, tmp_path / places[n])
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    want = dt.hold(copy.deepcopy(model), MX, verbose=False)
    for p in model.parameters():
        nn.init.zeros_(p)  # what is there is replaced
    model.moe.is_transposed = False
    model = model.to("meta")
    got, report = dt.hold(
        model, MX, checkpoint=tmp_path, rename=lambda n: n.removeprefix("base."), verbose=False, return_report=True
    )
    assert [m.held for m in report.modules] == ["mxfp8_e4m3"] * 2
    for (n, p), (_, other) in zip(got.named_parameters(), want.named_parameters(), strict=True):
        same_buffers(p, buffers(other)) if isinstance(p, dt.QuantizedParameter) else same(p, other, n)
    with pytest.raises(CheckpointError, match=re.escape("rename gives two tensors the name 'x'")):
        dt.hold(model, MX, checkpoint=tmp_path, rename=lambda n: "x")


def test_a_published_checkpoint_keeps_its_bits(tmp_path):
    """128x128 blocks in the names of published checkpoints; another format is quantized again from the values."""
    values = normal("w", (256, 256))
    q = dt.quantize(values, quantizer("fp8_e4m3_128x128", columnwise=False))
    save_file({"0.weight": q.rowwise_data, "0.weight_scale_inv": q.rowwise_scale_inv}, tmp_path / "x.safetensors")

    def loaded(name: str) -> Any:
        meta = nn.Sequential(nn.Linear(256, 256, bias=False, device="meta"))
        return dt.hold(meta, NAMED[name], checkpoint=tmp_path, verbose=False)[0].weight

    same(loaded("fp8-block").rowwise_data, q.rowwise_data)
    same(loaded("fp8-block").rowwise_scale_inv, q.rowwise_scale_inv)
    with pytest.warns(CheckpointWarning, match="its values are quantized again"):
        from diptych.torch.modules import held_state

        held_state._warned.clear()
        again = loaded("mxfp8")
    same_buffers(again, buffers(dt.quantize(q.dequantize(torch.float32), again.quantizer)))


def test_devices_and_dtypes(tmp_path):
    """All tensors in memory too; integer buffers and unsaved ones keep their dtype."""
    made = Model(tied=False)
    save_file(made.state_dict(), tmp_path / "x.safetensors")
    for m in (
        dt.hold(copy.deepcopy(made), MX, dtype=torch.bfloat16, device="cpu", verbose=False),
        dt.hold(Model(device="meta", tied=False), MX, checkpoint=tmp_path, dtype=torch.bfloat16, verbose=False),
        dt.hold(Model(tied=False), MX, checkpoint=tmp_path, dtype=torch.bfloat16, verbose=False),
    ):
        same_models(m, dt.hold(cast(copy.deepcopy(made), torch.bfloat16), MX, verbose=False))
    with torch.device("meta"):  # where a model was made, and no values can be
        m = dt.hold(Model(device="meta", tied=False), MX, checkpoint=tmp_path, verbose=False)
    assert not any(t.is_meta for t in [*m.parameters(), *m.buffers()])
    with torch.inference_mode():  # where models are made for inference
        m = dt.hold(Model(device="meta", tied=False), MX, checkpoint=tmp_path, verbose=False)
        m(torch.arange(32))
    assert not any(t.is_inference() or t.is_meta for t in [*m.parameters(), *m.buffers()])
    assert m.up.weight.columnwise_data is None


@pytest.mark.parametrize(
    ("change", "said"),
    (
        (lambda s: s.pop("up.bias"), "lacks up.bias; rename="),
        (lambda s: s.update(other=torch.zeros(1)), "has other, which the model has not; rename="),
        (lambda s: s.update({"up.weight": torch.zeros(3, 4)}), r"up.weight is \[400, 128\] here and \[3, 4\] in"),
        (lambda s: s.update({"norm.weight": torch.zeros(128).int()}), "norm.weight is torch.float32 here and int32 in"),
        (
            lambda s: s.update({"up.weight": torch.zeros(400, 128).to(torch.float8_e4m3fn)}),
            "up.weight is torch.float32 here and float8_e4m3fn in .*, without scales beside it",
        ),
    ),
)
def test_a_checkpoint_of_another_model_is_refused_before_anything_changes(change, said, tmp_path):
    made = Model(tied=False)
    state = dict(made.state_dict())
    change(state)
    save_file(state, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match=said):
        dt.hold(made, MX, checkpoint=tmp_path)
    assert type(made.up) is nn.Linear and type(made.up.weight) is nn.Parameter


def test_not_strict(tmp_path):
    """A tensor that the files lack stays, unless it lies on meta; one that the model lacks is not read."""
    made = Model(tied=False)
    state = {n: t for n, t in made.state_dict().items() if n not in ("up.bias", "head.weight")}
    save_file(state | {"other": torch.zeros(1)}, tmp_path / "x.safetensors")
    mine = Model(tied=False)
    bias, head = mine.up.bias.detach().clone(), mine.head.weight.detach().clone()
    dt.hold(mine, MX, ~dt.filters.head, checkpoint=tmp_path, strict=False, verbose=False)
    same(mine.up.bias, bias)
    same(mine.head.weight, head)
    same_buffers(mine.up.weight, buffers(dt.quantize(made.up.weight.detach(), mine.up.weight.quantizer)))
    with pytest.raises(CheckpointError, match=r"still on the meta device: up.bias, head.weight: .*init_empty_weights"):
        dt.hold(Model(device="meta", tied=False), MX, checkpoint=tmp_path, strict=False, verbose=False)


@pytest.mark.parametrize("name", ("fp8-delayed", "mxfp8"))
def test_a_module_in_two_places_has_the_names_of_both(name, tmp_path):
    def twice(device: str) -> nn.Sequential:
        layer = nn.Linear(64, 64, device=device)
        return nn.Sequential(layer, nn.GELU(), layer)

    want = dt.hold(twice("cpu"), NAMED[name], verbose=False)
    want(normal("x", (32, 64))).sum().backward()
    state = {n: t.clone() for n, t in dt.plain_state_dict(want).items()}
    for missing in ("0.", "2.", "-"):
        save_file({n: t for n, t in state.items() if not n.startswith(missing)}, tmp_path / "x.safetensors")
        got = dt.hold(twice("meta"), NAMED[name], checkpoint=tmp_path, verbose=False)
        assert got[0] is got[2]
        same_buffers(got[0].weight, buffers(want[0].weight))
        for (n, t), (other_n, u) in zip(got.named_buffers(), want.named_buffers(), strict=True):
            assert n == other_n
            same(t, u, n)


class NoRule(nn.Module):
    """A buffer that no checkpoint holds, and that nothing computes."""

    def __init__(self, device: str):
        super().__init__()
        self.body = nn.Linear(64, 64, device=device)
        self.register_buffer("angles", torch.zeros(4, device=device), persistent=False)

    def _init_weights(self, module):
        """Writes nothing."""


def test_tensors_that_stay_on_meta_are_refused(tmp_path):
    save_file(NoRule("cpu").state_dict(), tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match="still on the meta device: angles"):
        dt.hold(NoRule("meta"), MX, checkpoint=tmp_path, verbose=False)


def test_what_cannot_be_filled_is_refused(tmp_path):
    q = dt.quantize(normal("w", (48, 128)), MXFP8Quantizer(columnwise=False))
    state = Model(tied=False).state_dict()
    parts = {"embed.weight": q.rowwise_data, "embed.weight_scale_inv": q.rowwise_scale_inv}
    save_file(state | parts, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match=r"embed.weight is quantized in .* and the module that holds it"):
        dt.hold(Model(device="meta", tied=False), MX, checkpoint=tmp_path, verbose=False)
    save_file(state, tmp_path / "x.safetensors")
    made = dt.hold(Model(tied=False), MX, verbose=False)
    made.up.weight.main_param = torch.zeros(400, 128)
    with pytest.raises(CheckpointError, match=r"up.weight has a float32 master"):
        dt.hold(made, MX, checkpoint=tmp_path)
    with pytest.raises(CheckpointError, match="weight has no shape yet"):
        dt.hold(nn.Sequential(nn.LazyLinear(3)), MX, checkpoint=tmp_path)
    data = (tmp_path / "x.safetensors").read_bytes()
    (tmp_path / "x.safetensors").write_bytes(data[:-8])
    with pytest.raises(CheckpointError, match="is no safetensors file, or a damaged one"):
        dt.hold(Model(tied=False), MX, checkpoint=tmp_path)


def test_a_model_on_meta_without_a_checkpoint_is_filled_later():
    held = dt.hold(nn.Sequential(nn.Linear(64, 64)), MX, verbose=False)
    meta = dt.hold(nn.Sequential(nn.Linear(64, 64, device="meta")), MX, verbose=False)
    assert meta[0].weight.is_meta
    meta.load_state_dict(held.state_dict(), assign=True)
    same_buffers(meta[0].weight, buffers(held[0].weight))


# --- memory ----------------------------------------------------------------------------------------------------------

_PEAK = """
import sys, torch, diptych.torch as dt
from diptych.common import RECIPES
from torch import nn

def numbers():
    return {line.split(":")[0]: int(line.split()[1]) << 10 for line in open("/proc/self/status") if "kB" in line}

def made(layers, width):
    with torch.device("meta"):
        linears = [nn.Linear(width, width, bias=False) for _ in range(layers)]
        return nn.Sequential(nn.Embedding(1000, width), *linears).bfloat16()

small, big, layers, name = sys.argv[1:]
how = {"inference": True, "verbose": False}
dt.hold(made(1, 512), RECIPES[name], checkpoint=small, **how)  # loads and makes what the first call does
meta = made(int(layers), 4096)
open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
before = numbers()
dt.hold(meta, RECIPES[name], checkpoint=big, **how)
after = numbers()
parts = [t for p in meta.parameters() for t in (
    [getattr(p, n) for n in p.__tensor_flatten__()[0]] if isinstance(p, dt.QuantizedParameter) else [p])]
print(after["VmHWM"] - before["VmRSS"], sum(t.numel() * t.element_size() for t in parts))
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the peak is read from /proc")
@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_the_peak_is_a_tenth_above_what_is_held(name, tmp_path):
    """The process's resident memory at its highest, less that before the call, is at most 1.1 times the bytes of all
    tensors of the model as they end: payload and scales of held weights, and the embedding.

    Freed memory is returned at once here. By default malloc keeps some, up to about 30 MB whatever the model's size."""
    layers, tile = 5, normal("tile", (64, 4096), "bfloat16")
    for file, n, width in (("small", 1, 512), ("big", layers, 4096)):
        shapes = {"0.weight": 1000, **{f"{i}.weight": width for i in range(1, n + 1)}}
        rows = {name: tile[:, :width].repeat(-(-r // 64), 1)[:r].clone() for name, r in shapes.items()}
        save_file(rows, tmp_path / f"{file}.safetensors")
    given = [str(tmp_path / f"{file}.safetensors") for file in ("small", "big")]
    done = subprocess.run(
        [sys.executable, "-c", _PEAK, *given, str(layers), name],
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    peak, held = map(int, done.stdout.split())
    assert held > 50 << 20
    assert 0.9 * held < peak < 1.1 * held, f"{peak / held:.3f}"


def test_parts_are_all_that_exists_beside(tmp_path, monkeypatch):
    """The largest tensor that a read makes, beside the held buffers: one part, whatever the weight's size."""
    width = 1024
    save_file({"0.weight": normal("w", (width, width), "bfloat16")}, tmp_path / "x.safetensors")
    reads: list[int] = []
    rows = held_checkpoint._Reader.rows

    def counted(self, begin, end):
        out = rows(self, begin, end)
        reads.append(out.numel() * out.element_size())
        return out

    monkeypatch.setattr(held_checkpoint, "PART", 1 << 18)
    monkeypatch.setattr(held_checkpoint._Reader, "rows", counted)
    for recipe, passes in ((MX, 1), (NVFP4BlockScaling(), 2)):
        reads.clear()
        meta = nn.Sequential(nn.Linear(width, width, bias=False, device="meta", dtype=torch.bfloat16))
        dt.hold(meta, recipe, checkpoint=tmp_path, verbose=False)
        assert sum(reads) == passes * 2 * width**2 and max(reads) == 1 << 18


@pytest.mark.cuda
@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_onto_a_gpu(name, cuda, tmp_path, monkeypatch):
    """Weights that are read onto a GPU have the CPU's bits, and the allocator's peak is a tenth above them."""
    width = 2048
    names = [f"{i}.weight" for i in range(4)]
    save_file({n: normal(n, (width, width), "bfloat16") for n in names}, tmp_path / "x.safetensors")
    monkeypatch.setattr(held_checkpoint, "PART", 128 * width * 2)

    def made(device: str | None) -> Any:
        with torch.device("meta"):
            model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in names]).bfloat16()
        return dt.hold(
            model, NAMED[name], checkpoint=tmp_path, device=device, inference=True, verbose=False
        ).requires_grad_(False)

    made(cuda)  # what the first call makes
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    got, want = made(cuda), made(None)
    held = sum(t.numel() * t.element_size() for layer in got for t in buffers(layer.weight).values())
    assert 0.9 * held < torch.cuda.max_memory_allocated() - before < 1.1 * held
    for a, b in zip(got, want, strict=True):
        assert a.weight.device.type == cuda
        same_buffers(a.weight, buffers(b.weight))
    in_memory = dt.unhold(want)
    dt.hold(in_memory, NAMED[name], device=cuda, inference=True, verbose=False)
    assert all(t.is_cuda for t in [*in_memory.parameters(), *in_memory.buffers()])
