"""The table of Hugging Face's names in PyTorch and flax, and the spelling of names."""

import pytest

from diptych.lab.diff import names
from diptych.lab.traces import Site


def site(name: str, kind: str = "activation") -> Site:
    return Site(name, kind, 0, (2,), "float32")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "path", "place"),
    [
        ("h.0.mlp", "h/0/mlp", ""),
        ("h/0/mlp[0]", "h/0/mlp", "[0]"),
        ("(model)['last.state'][1]", "(model)", '["last.state"][1]'),
        ('a.b["x.y"]', "a/b", '["x.y"]'),
        ("h.0.fc/gemm.d", "h/0/fc/gemm/d", ""),
        ("a[x]", "a[x]", ""),
    ],
)
def test_split(name, path, place):
    assert names.split(name) == (path, place)
    assert names.normal(name) == path + place


# PyTorch's name, flax's name
PARAMETERS = [
    ("transformer.wte.weight", "transformer/wte/embedding"),
    ("transformer.h.1.ln_1.weight", "transformer/h/1/ln_1/scale"),
    ("transformer.h.1.attn.c_attn.weight", "transformer/h/1/attn/c_attn/kernel"),
    ("wte.weight", "transformer/wte/embedding"),
    ("model.layers.0.self_attn.q_proj.weight", "model/layers/0/self_attn/q_proj/kernel"),
    ("model.layers.0.input_layernorm.weight", "model/layers/0/input_layernorm/weight"),
    ("lm_head.weight", "lm_head/kernel"),
    ("vit.embeddings.patch_embeddings.projection.weight", "vit/embeddings/patch_embeddings/projection/kernel"),
    ("vit.embeddings.cls_token", "vit/embeddings/cls_token"),
    ("bert.encoder.layer.0.attention.self.query.bias", "bert/encoder/layer/0/attention/self/query/bias"),
    ("bert.embeddings.LayerNorm.gamma", "bert/embeddings/LayerNorm/scale"),
    ("bert.embeddings.LayerNorm.beta", "bert/embeddings/LayerNorm/bias"),
    ("bn.running_mean", "bn/mean"),
    ("_orig_mod.h.3.fc.weight", "params/h_3/fc/kernel"),
    ("module.h.3.fc.weight", "layers_3/fc/kernel"),
    ("blocks.3.fc.weight", "layers/3/fc/kernel/value"),
]
ACTIVATIONS = [
    ("transformer.drop", "transformer/dropout"),
    ("transformer.h.0", "transformer/h/0"),
    ("_orig_mod", "(model)"),
    ("(model)", "(model)"),
    ("h.0.mlp[0]", "layers_0/mlp[0]"),
]


@pytest.mark.parametrize(("torch", "flax"), PARAMETERS)
def test_parameters_have_one_name(torch, flax):
    assert names.common(site(torch, "parameter")) == names.common(site(flax, "parameter"))


@pytest.mark.parametrize(("torch", "flax"), ACTIVATIONS)
def test_activations_have_one_name(torch, flax):
    assert names.common(site(torch)) == names.common(site(flax))


@pytest.mark.parametrize(
    ("a", "b", "kind"),
    [
        ("h.0.q.weight", "h/0/k/kernel", "parameter"),
        ("h.1.q.weight", "h/0/q/kernel", "parameter"),
        ("h.0.q.weight", "h/0/q/bias", "parameter"),
        ("kernel", "weight", "activation"),
        ("h.0[0]", "h/0[1]", "activation"),
        ("model.encoder", "(model)", "activation"),
        ("model", "(model)", "activation"),
    ],
)
def test_other_names_stay_apart(a, b, kind):
    assert names.common(site(a, kind)) != names.common(site(b, kind))


def test_leaf_and_parent():
    assert names.leaf(site("h.0.fc.weight", "parameter_grad")) == "weight"
    assert names.leaf(site("h.0.fc")) == ""
    assert names.parent(site("h.0.fc.weight", "parameter")) == "h/0/fc"
    assert names.parent(site("h.0.fc[1]")) == "h/0/fc"
    assert names.parent(site("h.0.fc/gemm.d", "result")) == "h/0/fc/gemm"
