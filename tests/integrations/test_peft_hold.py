"""QLoRA with PEFT: adapters over a Hugging Face model whose weights are held, read from its files, trained, merged,
saved and loaded again."""

# ruff: noqa: E402 - imports follow the check that the packages are there

from __future__ import annotations

import copy
import re
import warnings
from pathlib import Path
from typing import Any

import pytest

for _package in ("peft", "transformers"):
    pytest.importorskip(_package, reason=f"{_package} is not installed; `make integrations` runs this file")

import torch
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    Qwen2Config,
    Qwen3MoeConfig,
)

import diptych.torch as dt
from diptych.common import RECIPES, MXFP8BlockScaling
from diptych.common.errors import LostUpdateWarning
from diptych.torch.tensors.quantized import parts_of

MX = MXFP8BlockScaling()
TOKENS = torch.randint(0, 64, (4, 32), generator=torch.Generator().manual_seed(3))
SIZES: dict[str, Any] = dict(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
    max_position_embeddings=64, dtype="bfloat16",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a model is published in: bfloat16, in several files with an index."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("published")
    LlamaForCausalLM(LlamaConfig(**SIZES)).bfloat16().save_pretrained(path, max_shard_size="100KB")
    assert len(list(path.glob("*.safetensors"))) > 1 and (path / "model.safetensors.index.json").exists()
    return path


def on_meta(folder: Path, **changes: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, **changes)).eval()


def held(folder: Path, recipe: Any = MX, **options: Any) -> Any:
    """A model that never exists in high precision, its head left in it."""
    return dt.hold(on_meta(folder), recipe, ~dt.filters.head, checkpoint=folder, verbose=False, **options)


def adapted(base: Any, **options: Any) -> Any:
    """Adapters whose second factor is not zero, beside all layers but the head."""
    torch.manual_seed(1)
    config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", init_lora_weights=False, **options)
    return get_peft_model(base, config)


def train(model: Any, steps: int, optimizer: Any = None, run: Any = None) -> tuple[list[float], Any]:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2) if optimizer is None else optimizer
    losses = []
    for _ in range(steps):
        loss = (model if run is None else run)(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, optimizer


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS).logits


def kept(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all buffers of held weights, by the names that they have without adapters."""
    weights = {n: p for n, p in model.named_parameters() if isinstance(p, dt.QuantizedParameter)}
    return {
        f"{n}.{part}".replace("base_layer.", ""): t.clone()
        for n, p in weights.items()
        for part, t in parts_of(p).items()
    }


def same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys() and want
    for name, t in want.items():
        assert torch.equal(got[name].view(torch.uint8), t.view(torch.uint8)), name


@pytest.mark.parametrize("name", RECIPES)
def test_from_files_to_a_trained_adapter_and_back(name, folder, tmp_path):
    """The held base has the bits of the model that transformers loads; it does not change; a fresh base with the saved
    adapters computes the same and trains on with the same bits."""
    base = held(folder, RECIPES[name])
    loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
    dt.hold(loaded, RECIPES[name], ~dt.filters.head, verbose=False)
    same(kept(base), kept(loaded))
    if name != "fp8-delayed":  # of which both have scales of their own, from their first calls
        assert torch.equal(logits(base), logits(loaded))
    before = kept(base)
    assert len({n.rpartition(".")[0] for n in before}) == 14

    model = adapted(base)
    dt.seed_rng(model, 5)
    frozen = [n for n, p in model.named_parameters() if not p.requires_grad]
    assert all("lora_" not in n for n in frozen)
    losses, optimizer = train(model, 4)
    assert losses[-1] < losses[0]
    same(kept(base), before)

    model.save_pretrained(tmp_path)
    states, moments = dt.plain_state_dict(model), copy.deepcopy(optimizer.state_dict())
    states = {n: t.clone() for n, t in states.items() if "scale_states" in n or n.endswith("rng_state")}
    again = PeftModel.from_pretrained(held(folder, RECIPES[name]), tmp_path, is_trainable=True).eval()
    again.load_state_dict(states, strict=False)  # of delayed scaling and stochastic rounding
    assert torch.equal(logits(again), logits(model))
    resumed = torch.optim.AdamW([p for p in again.parameters() if p.requires_grad], lr=1e-2)
    resumed.load_state_dict(moments)
    assert train(again, 2, resumed)[0] == train(model, 2, optimizer)[0]
    assert torch.equal(logits(again), logits(model))


def test_a_held_model_is_saved_and_loaded(folder, tmp_path):
    base = held(folder)
    base.save_pretrained(tmp_path, state_dict=dt.plain_state_dict(base))
    again = held(tmp_path)
    same(kept(again), kept(base))
    assert torch.equal(logits(again), logits(base))


def test_merged_into_held_weights(folder, tmp_path):
    """Each sum is computed in high precision and quantized, with one warning; the result is held, saved and loaded."""
    model = adapted(held(folder))
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    values = layer.base_layer.weight.dequantize() + layer.get_delta_weight("default")  # adapters are float32
    want = dt.quantize(values.detach().bfloat16(), layer.base_layer.weight.quantizer)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        merged = model.merge_and_unload()
    assert all(issubclass(w.category, LostUpdateWarning) for w in said) and len(said) <= 1
    weight = merged.model.layers[0].self_attn.q_proj.weight
    assert isinstance(weight, dt.QuantizedParameter)
    same(parts_of(weight), parts_of(want))
    merged.save_pretrained(tmp_path, state_dict=dt.plain_state_dict(merged))
    assert torch.equal(logits(held(tmp_path)), logits(merged))


def test_merged_in_high_precision(folder, tmp_path):
    """After `unhold` a merge rounds to bfloat16 alone; transformers reads the result, and it can be held again."""
    model = adapted(held(folder))
    layer = model.base_model.model.model.layers[1].mlp.down_proj
    values, delta = layer.base_layer.weight.dequantize(), layer.get_delta_weight("default").detach()
    with warnings.catch_warnings():
        warnings.simplefilter("error", LostUpdateWarning)
        merged = dt.unhold(model).merge_and_unload()
    weight = merged.model.layers[1].mlp.down_proj.weight
    assert type(weight) is nn.Parameter and torch.equal(weight, (values + delta).bfloat16())
    merged.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(loaded.model.layers[1].mlp.down_proj.weight, weight)
    dt.hold(merged, MX, ~dt.filters.head, verbose=False)
    assert torch.equal(logits(held(tmp_path)), logits(merged))


def test_other_ways_over_a_held_base(folder):
    """Adapters first and then `hold`, which leaves them; PEFT's preparation; an adapter switched off; DoRA."""
    first = adapted(AutoModelForCausalLM.from_pretrained(folder).eval())
    _, report = dt.hold(first, MX, ~dt.filters.head, verbose=False, return_report=True)
    assert all(m.name.endswith("base_layer") for m in report.modules if m.held) and report.held_bytes > 0
    later = adapted(held(folder))
    assert torch.equal(logits(first), logits(later))
    assert train(first, 2)[0] == train(later, 2)[0]
    with later.disable_adapter():
        assert torch.equal(logits(later), logits(held(folder)))
    prepared = prepare_model_for_kbit_training(held(folder), use_gradient_checkpointing=False)
    assert (
        all(not p.requires_grad for p in prepared.parameters()) and kept(prepared).keys() == kept(held(folder)).keys()
    )
    dora = adapted(held(folder), use_dora=True)
    before = kept(dora)
    losses, _ = train(dora, 3)
    assert losses[-1] < losses[0]
    same(kept(dora), before)


def test_initializations_that_change_the_base_are_refused(folder):
    """PiSSA and OLoRA take factors out of the base, in products on its values, which would not be held any more."""
    for way in ("pissa", "olora"):
        with pytest.raises(NotImplementedError, match="is not defined on a weight that is held quantized"):
            get_peft_model(held(folder), LoraConfig(target_modules=["q_proj"], init_lora_weights=way))


def test_compiled(folder):
    """One block of the model, whose files have more."""
    eager, model = [
        adapted(dt.hold(on_meta(folder, num_hidden_layers=1), MX, checkpoint=folder, strict=False, verbose=False))
        for _ in range(2)
    ]
    compiled = torch.compile(model, backend="aot_eager")
    got, want = train(model, 3, run=compiled)[0], train(eager, 3)[0]
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-2, atol=1e-2)
    assert got[-1] < got[0]


def test_a_tied_head_stays_with_its_embedding(tmp_path):
    torch.manual_seed(0)
    sizes = SIZES | {"num_key_value_heads": 1, "tie_word_embeddings": True}
    AutoModelForCausalLM.from_config(Qwen2Config(**sizes)).bfloat16().save_pretrained(tmp_path)
    with pytest.warns(dt.ConvertWarning, match=r"lm_head .* not held: shares its weight with model.embed_tokens"):
        model = dt.hold(on_meta(tmp_path), MX, checkpoint=tmp_path, verbose=False)
    assert model.lm_head.weight is model.model.embed_tokens.weight and type(model.lm_head.weight) is nn.Parameter
    losses, _ = train(adapted(model), 3)
    assert losses[-1] < losses[0]


def _mlp(name: str) -> str:
    return name.replace("block_sparse_moe", "mlp")  # as Mixtral's files call it


@pytest.mark.parametrize("kind", ("mixtral", "qwen3_moe"))
def test_mixtures(kind, tmp_path):
    """transformers stacks the experts that files hold one by one, and takes them apart as it saves, held ones too."""
    torch.manual_seed(0)
    sizes = SIZES | {"num_key_value_heads": 1, "num_hidden_layers": 1}
    config = (
        MixtralConfig(**sizes, num_local_experts=4)
        if kind == "mixtral"
        else Qwen3MoeConfig(**sizes, moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2, head_dim=32)
    )
    folder, again = tmp_path / "published", tmp_path / "held"
    AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(folder)
    loaded = dt.hold(AutoModelForCausalLM.from_pretrained(folder).eval(), MX, ~dt.filters.head, verbose=False)
    read = held(folder, rename=_mlp)
    same(kept(read), kept(loaded))
    assert any("gate_up_proj" in name for name in kept(read))
    assert torch.equal(logits(read), logits(loaded))
    read.save_pretrained(again, state_dict=dt.plain_state_dict(read))
    same(kept(held(again, rename=_mlp)), kept(read))
    attention = LoraConfig(r=8, target_modules=["q_proj", "v_proj", "o_proj"])
    losses, _ = train(get_peft_model(read, attention), 3)
    assert losses[-1] < losses[0]
    experts = LoraConfig(r=8, target_modules=[], target_parameters=["experts.gate_up_proj"])
    with pytest.raises(NotImplementedError, match="is not defined on a weight that is held quantized"):
        logits(get_peft_model(held(folder, rename=_mlp), experts))  # PEFT adds a delta to the stack in each forward


def test_the_code_on_the_page_runs(folder, tmp_path, monkeypatch):
    """The block of docs/recipes.md that needs transformers and PEFT, in a folder where its model is."""
    page = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
    (block,) = re.findall(r"```py\n(.*?)```", page, re.S)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama").symlink_to(folder)
    exec(compile(block, "docs/recipes.md", "exec"), {})
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.dtype == torch.bfloat16 and not kept(merged)
