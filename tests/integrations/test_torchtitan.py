"""torchtitan: LinearConverter in its registry of models, and training of a model of its modules, which need no GPU.

torchtitan's attention and its Trainer run on GPUs alone. The model here has its embedding, feed-forward blocks and
head, built on meta and initialized as the Trainer does it; checkpoints are torch.distributed.checkpoint's, as its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import types
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torchtitan.components.lora import LoRAConverter
from torchtitan.models.common.embedding import Embedding
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.linear import Linear, ScaledBiasRowwiseLinear
from torchtitan.models.llama3 import model_registry
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.module import ModuleList

import diptych.torch as dt
from diptych.common import RECIPES, UnsupportedError
from diptych.torch.integrations.torchtitan import LinearConverter, QuantizedLinear
from integrations.tiny import RECIPE_NAMES, WORDS, differs, require_quantized, same, tokens, values

INIT = {"weight": partial(nn.init.normal_, std=0.1)}
LAYERS = 7


class Tiny(BaseModel):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        embedding: Embedding.Config
        layers: list[FeedForward.Config]
        lm_head: Linear.Config

        def update_from_config(self, *, config: Any, **others: Any) -> None:
            raise NotImplementedError  # the Trainer's alone

        def get_nparams_and_flops(self, model: Any, seq_len: int) -> tuple[int, int]:
            raise NotImplementedError

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embedding, self.lm_head = config.embedding.build(), config.lm_head.build()
        self.layers = ModuleList(block.build() for block in config.layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.embedding(x)
        for block in self.layers:
            y = y + block(y)
        return self.lm_head(y)


def config() -> Tiny.Config:
    def linear(k: int, n: int) -> Linear.Config:
        return Linear.Config(in_features=k, out_features=n, param_init=INIT)

    blocks = [FeedForward.Config(w1=linear(32, 64), w2=linear(64, 32), w3=linear(32, 64)) for _ in range(2)]
    table = Embedding.Config(num_embeddings=len(WORDS), embedding_dim=32, param_init=INIT)
    return Tiny.Config(embedding=table, layers=blocks, lm_head=linear(32, len(WORDS)))


def built(name: str = "", seed: int = 5, **options: Any) -> Any:
    """Returns the model as the Trainer builds it; in high precision if no recipe is named."""
    made: Any = config()
    if name:
        made = LinearConverter.Config(recipe=RECIPES[name], **options).build().convert(made)
    with torch.device("meta"):
        model = made.build()
    model.verify_module_protocol()
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_states()
    dt.seed_rng(model, seed)
    return model


def trained(name: str, folder: Path, resume: bool = False, backend: str | None = None) -> tuple[Any, Any]:
    """Returns the model and its optimizer after four steps, or after the last two of them from a checkpoint."""
    model = built(name, seed=6 if resume else 5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if resume:
        state = model.state_dict()
        dcp.load(state, checkpoint_id=folder / "model", no_dist=True)
        model.load_state_dict(state)
        optimizer.load_state_dict(torch.load(folder / "optimizer.pt"))
    if backend is not None:
        for block in model.layers:
            block.compile(backend=backend, fullgraph=True)
    for i in range(2 * resume, 4):
        x = tokens(2, seed=i)
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if i == 1 and not resume:
            dcp.save(model.state_dict(), checkpoint_id=folder / "model", no_dist=True)
            torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    return model, optimizer


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_resume(tmp_path, name):
    whole, optimizer = trained(name, tmp_path)
    require_quantized(whole, RECIPES[name], LAYERS)
    assert differs(values(whole), values(built()))
    again, its_optimizer = trained(name, tmp_path, resume=True)
    same(values(again, its_optimizer), values(whole, optimizer))


def test_compiled(tmp_path):
    """Block by block, as torchtitan compiles."""
    whole, _ = trained("fp8-delayed", tmp_path)
    again, _ = trained("fp8-delayed", tmp_path, resume=True, backend="aot_eager")
    assert sum(layer.compiled for layer in dt.report(again).quantized) == LAYERS - 1
    same(values(again), values(whole))


def test_the_registry_takes_the_converter():
    """A Llama of torchtitan's registry is built on meta; its config is written as JSON, as the Trainer does."""
    given = LinearConverter.Config(recipe=RECIPES["fp8-delayed"], filter_fqns=["lm_head"])
    spec = model_registry("debugmodel", converters=[given])
    json.dumps(spec.model.to_dict())
    with torch.device("meta"):
        model = spec.model.build()
    model.verify_module_protocol()
    kinds = {name: type(m) for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    assert kinds.pop("lm_head") is Linear and set(kinds.values()) == {QuantizedLinear} and len(kinds) > 20
    assert all(model.get_submodule(name).name == name for name in kinds)


def test_adapters_come_after():
    """The base is quantized and frozen, its adapters stay in high precision; torchtitan refuses the other order."""
    quantized, lora = LinearConverter.Config(recipe=RECIPES["fp8-current"]), LoRAConverter.Config(rank=8)
    made = lora.build().convert(quantized.build().convert(config()))
    model = made.build()
    model.init_states()
    x = tokens(2)
    nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()
    require_quantized(model, RECIPES["fp8-current"], LAYERS)
    assert {name.rpartition(".")[0][-6:] for name, p in model.named_parameters() if p.grad is not None} == {
        "lora_a", "lora_b"
    }  # fmt: skip
    with pytest.raises(ValueError, match="must be applied before"):
        model_registry("debugmodel", converters=[lora, quantized])


def test_what_is_left():
    made = config()
    made.layers[0].w1 = ScaledBiasRowwiseLinear.Config(in_features=32, out_features=64)
    made.layers[1].w2 = Linear.Config(in_features=8, out_features=32)
    with pytest.warns(dt.ConvertWarning, match=r"layers.0.w1 \(ScaledBiasRowwiseLinear.Config\) is left as it is"):
        LinearConverter.Config(recipe=RECIPES["mxfp8"]).build().convert(made)
    left = [fqn for fqn, layer, *_ in made.traverse(Linear.Config) if not isinstance(layer, QuantizedLinear.Config)]
    assert left == ["layers.0.w1", "layers.1.w2"]


def test_refusals():
    with pytest.raises(ValueError, match=r"filter_fqns has 'head2', which is in no layer's name: layers\.0\.w1, "):
        built("mxfp8", filter_fqns=["head2"])
    with pytest.raises(TypeError, match="LinearConverter: recipe must be a diptych"):
        LinearConverter.Config(recipe="mxfp8").build()  # type: ignore[arg-type]
    dims = types.SimpleNamespace(tp_enabled=True)
    with pytest.raises(UnsupportedError, match=r"Linear 'lm_head': torchtitan's tensor parallelism, .*degree=1"):
        built("mxfp8").lm_head.parallelize(dims)


def test_without_torchtitan():
    """The message names the package to install. An entry None in sys.modules stands for a package that is absent."""
    code = (
        "import sys; sys.modules['torchtitan'] = None\n"
        "import diptych.torch.integrations.torchtitan"
    )  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode and "needs torchtitan 0.3 or newer" in done.stderr
    assert "pip install torchtitan" in done.stderr
