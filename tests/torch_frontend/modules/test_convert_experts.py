"""convert: Conv1D and experts in stacks, as transformers keeps them, and the report of what was left and why."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import diptych.torch as dt
from diptych.common import RECIPES, ArgumentError, DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling
from diptych.core import reset_calls
from diptych.torch.modules.experts import RoutedExperts, TransposedLinear
from torch_frontend.tools import calls, normal, same

MX = MXFP8BlockScaling()
E, H, I = 4, 64, 96  # noqa: E741


class Experts(nn.Module):
    """Gated experts token by token, in the form that transformers gives them. `transposed`, `bias`: as gpt-oss."""

    def __init__(self, transposed=False, bias=False, scale=1.0):
        super().__init__()
        torch.manual_seed(0)
        shapes = {"gate_up": (E, 2 * I, H), "down": (E, H, I)}
        for name, (e, n, k) in shapes.items():
            p = nn.Parameter(torch.randn(e, n, k) / k**0.5)
            setattr(self, f"{name}_proj", nn.Parameter(p.transpose(1, 2).contiguous()) if transposed else p)
            if bias:
                setattr(self, f"{name}_proj_bias", nn.Parameter(torch.randn(e, n)))
        self.act_fn, self.flip, self.bias, self.scale = nn.SiLU(), transposed, bias, scale

    def forward(self, hidden_states, top_k_index, top_k_weights):
        out = torch.zeros_like(hidden_states)
        for t, (ids, weights) in enumerate(zip(top_k_index.tolist(), top_k_weights, strict=True)):
            for e, w in zip(ids, weights, strict=True):
                x, found = hidden_states[t], []
                for name in ("gate_up", "down"):
                    matrix = getattr(self, f"{name}_proj")[e]
                    x = x @ (matrix if self.flip else matrix.t())
                    x = x + getattr(self, f"{name}_proj_bias")[e] if self.bias else x
                    if not found:
                        gate, up = x.chunk(2, -1)
                        x = self.act_fn(gate) * up * self.scale
                    found.append(x)
                out[t] = out[t] + x * w
        return out


def routing(tokens, k=2):
    generator = torch.Generator().manual_seed(1)
    ids = torch.stack([torch.randperm(E, generator=generator)[:k] for _ in range(tokens)])
    return normal("hidden", (tokens, H)), ids, torch.rand(tokens, k, generator=generator)


def step(module, recipe=None):
    x, ids, weights = routing(32)
    leaves = x.requires_grad_(), weights.requires_grad_()
    with dt.autocast(recipe is not None, recipe=recipe):
        y = module(x, ids, weights)
    y.square().sum().backward()
    return [y.detach(), *[t.grad for t in leaves], *[p.grad for p in module.parameters()]]


@pytest.mark.parametrize("form", [{}, {"transposed": True, "bias": True}], ids=["plain", "transposed"])
def test_experts_in_stacks_keep_their_results_and_quantize(form):
    module = Experts(**form)
    want, before = step(copy.deepcopy(module)), dict(module.named_parameters())
    keys = list(module.state_dict())
    down = keys.index("down_proj")
    model = nn.ModuleDict({"experts": module})
    assert dt.convert(model, verbose=False) is model and type(module) is RoutedExperts
    assert all(p is before[n] for n, p in module.named_parameters()) and list(module.state_dict()) == keys
    for got, value in zip(step(copy.deepcopy(module)), want, strict=True):
        torch.testing.assert_close(got, value, rtol=1e-4, atol=1e-4)
    for recipe in RECIPES.values():
        m = copy.deepcopy(module).bfloat16()
        dt.seed_rng(m, 1)
        for _ in range(2):  # the first scales of delayed scaling know nothing
            m.zero_grad()
            reset_calls()
            x, ids, weights = routing(32)
            x, weights = x.bfloat16().requires_grad_(), weights.requires_grad_()
            with dt.autocast(recipe=recipe):
                y = m(hidden_states=x, top_k_index=ids, top_k_weights=weights)
            y.float().square().sum().backward()
        assert calls("grouped_gemm") == 6
        near = {"y": (y, want[0]), "weights": (weights.grad, want[2]), "down": (m.down_proj.grad, want[3 + down])}
        for name, (got, value) in near.items():
            assert (got.float() - value).norm() / value.norm() < 0.5, (recipe, name)
    assert {n.rsplit(".", 2)[0] for n in m.state_dict() if "scale" in n} == set()


def test_roles_and_states_of_both_products():
    module = Experts()
    dt.convert(nn.ModuleDict({"moe": module}), DelayedScaling(), verbose=False)
    step(module, MX)  # the module's own recipe goes before
    found = {n for n in module.state_dict() if n.endswith(".scale")}
    slots = [
        f"scale_states.{layer}.{t}.scale" for layer in ("gate_up", "down") for t in ("input", "weight", "grad_output")
    ]
    assert found == set(slots) and (module.recipe, module.name) == (DelayedScaling(), "moe")
    with dt.autocast(enabled=False, calibrating=True, recipe=DelayedScaling()):
        module(*routing(8))
    assert all(module.get_submodule(s.rsplit(".", 1)[0]).amax_history[0] > 0 for s in slots if "grad" not in s)


def test_experts_compile_as_they_run():
    torch._dynamo.reset()
    module = Experts()
    dt.convert(module, verbose=False)
    args = routing(32)
    with dt.autocast(recipe=MX), torch.no_grad():
        want = module(*args)
        same(torch.compile(module, backend="aot_eager", fullgraph=True)(*args), want)


class Sorted(nn.Module):
    """Tokens come by expert, as Llama 4 has them."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Parameter(torch.ones(E, H, 2 * I)), nn.Parameter(torch.ones(E, I, H))
        self.act_fn = nn.SiLU()

    def forward(self, hidden_states):
        return hidden_states


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(2, 3, 4))


def test_what_departs_is_left_named_and_whole():
    changed = Experts()
    changed.forward = lambda *_: None
    broken = Experts(bias=True)
    broken.down_proj_bias = nn.Parameter(torch.randn(E, 3))
    parts = {"scaled": Experts(scale=2.0), "sorted": Sorted(), "stack": Stack(), "changed": changed,
             "broken": broken, "meta": Experts().to("meta"), "lin": nn.Linear(4, 4)}  # fmt: skip
    parts["one"] = Experts()
    model = nn.ModuleDict(parts)
    held = {n: set(vars(m)) for n, m in parts.items()}
    with pytest.warns(dt.ConvertWarning) as said:
        _, report = dt.convert(model, filter=lambda _, name: name != "lin", verbose=False, return_report=True)
    why = {"scaled": "computes something else", "sorted": r"is called with hidden_states", "stack": "holds w, not",
           "changed": "forward of its own", "broken": "raises", "meta": "lies on meta"}  # fmt: skip
    rows = {m.name: m for m in report.modules}
    for name, reason in why.items():
        assert reason in rows[name].why and not rows[name].converted and set(vars(parts[name])) == held[name], rows[
            name
        ]
        assert sum(f"convert: {name} (" in str(w.message) and reason in str(w.message) for w in said) == 1
    assert len(said) == len(why) and rows["lin"].why == "the filter left it" and rows["one"].converted


def test_conv1d_is_a_linear_layer_of_the_transposed_weight():
    transformers = pytest.importorskip("transformers")
    theirs = transformers.pytorch_utils.Conv1D(96, 64)
    ours = dt.Linear(64, 96)
    with torch.no_grad():
        ours.weight.copy_(theirs.weight.t())
        ours.bias.copy_(theirs.bias.normal_())
    keys = list(theirs.state_dict())
    x = normal("x", (4, 32, 64))
    want = theirs(x)
    assert dt.convert(theirs, verbose=False) is theirs and type(theirs) is TransposedLinear
    torch.testing.assert_close(theirs(x), want)
    for recipe in (MX, Float8CurrentScaling()):
        results = []
        for m in (ours, theirs):
            m.zero_grad()
            leaf = x.clone().requires_grad_()
            with dt.autocast(recipe=recipe):
                y = m(leaf)
            y.square().sum().backward()
            w = m.weight.grad.t() if m is theirs else m.weight.grad
            results.append([y, leaf.grad, w, m.bias.grad])
        for a, b in zip(*results, strict=True):
            same(a.contiguous(), b.contiguous())
    assert list(theirs.state_dict()) == keys and theirs.weight.shape == (64, 96)
    assert repr(theirs) == "TransposedLinear(in_features=64, out_features=96, recipe=None: needs autocast)"


def _tiny(kind):
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            n_layer=2, n_embd=64, n_head=4, vocab_size=128, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config)
    if kind == "gpt-oss":
        config = transformers.GptOssConfig(
            **small, num_local_experts=4, head_dim=16, layer_types=["full_attention"] * 2
        )
        return transformers.GptOssForCausalLM(config)
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**small, num_local_experts=4))


@pytest.mark.parametrize("kind", ["mixtral", "gpt2", "gpt-oss"])
def test_models_of_transformers(kind, capsys):
    """Converted whole but for embeddings, routers and vectors: same logits outside of a region, near ones inside."""
    model, tokens = _tiny(kind), torch.arange(64).reshape(2, 32) * 7 % 128
    with torch.no_grad():
        want = model(tokens).logits
    with warnings.catch_warnings():
        warnings.simplefilter("error", dt.ConvertWarning)
        converted, report = dt.convert(model, return_report=True)
    assert converted is model and str(report) + "\n" == capsys.readouterr().out
    assert report.converted + report.left == sum(p.numel() for p in model.parameters())
    left = {m.kind for m in report.modules if not m.converted}
    assert all(k.endswith(("Embedding", "Norm", "Router", "Attention")) for k in left), left
    assert f"{report.converted:,} of {report.converted + report.left:,} parameters" in str(report)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, want, rtol=1e-3, atol=1e-3)
    with dt.autocast(recipe=MX):
        out = model(tokens, labels=tokens)
    out.loss.backward()
    assert 0 < (out.logits - want).norm() / want.norm() < 0.2
    assert all(p.grad is not None for m in model.modules() if isinstance(m, dt.QuantizedModule) for p in m.parameters())


def test_arguments():
    with pytest.raises(ArgumentError, match="convert: verbose must be a bool, got str"):
        dt.convert(nn.Linear(2, 2), verbose="no")
    module = Experts()
    dt.convert(module, verbose=False)
    with pytest.raises(ArgumentError, match="takes hidden_states, top_k_index, top_k_weights, got also mask"):
        module(*routing(4), mask=None)


def test_a_quantized_layer_says_so_in_few_characters():
    with torch.device("meta"):
        modules = [
            dt.Linear(4096, 14336),
            dt.GroupedLinear(128, 4096, 14336),
            dt.LayerNormLinear(4096, 14336, eps=1e-6),
            dt.LayerNormMLP(4096, 14336, normalization="RMSNorm", activation="swiglu"),
            nn.Linear(4096, 14336),
        ]
    dt.convert(modules[-1], verbose=False)
    for recipe in (None, *RECIPES.values(), Float8CurrentScaling(backward_override="dequantized")):
        for m in modules:
            m.recipe = recipe
            text = repr(m)
            assert len(text) < 100 and "\n" not in text, text
            assert ("recipe=None: needs autocast" if recipe is None else f"recipe={type(recipe).__name__}(") in text
