"""Small models and texts, made from seeds, and comparisons bit by bit, for the tests of other projects' trainers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import diptych.torch as dt
from diptych.common import RECIPES

WORDS = ("<pad>", "<s>", "</s>", "<unk>", "user", "model", *(f"word{i}" for i in range(58)))
RECIPE_NAMES = tuple(RECIPES)


def llama(**changes: Any) -> LlamaForCausalLM:
    """Returns a Llama of two layers, with the same weights in every call."""
    torch.manual_seed(0)
    config: dict[str, Any] = dict(
        vocab_size=len(WORDS), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**config | changes))


def converted(name: str, seed: int = 5, **changes: Any) -> LlamaForCausalLM:
    """Returns the Llama converted to a recipe, with its random generators seeded."""
    model = dt.convert(llama(**changes), RECIPES[name], verbose=False)
    dt.seed_rng(model, seed)
    return model


def tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer of whole words with a chat template."""
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    made = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    made.chat_template = "{% for m in messages %}{{ m.role }} {{ m.content }} </s> {% endfor %}"
    return made


def tokens(rows: int, length: int = 16, seed: int = 0) -> Tensor:
    """Returns tokens [rows, length] of the vocabulary without the special ones."""
    return torch.randint(6, len(WORDS), (rows, length), generator=torch.Generator().manual_seed(seed))


def text(rows: int, words: int = 8, seed: int = 0) -> list[str]:
    """Returns lines of words."""
    return [" ".join(WORDS[i] for i in row) for row in tokens(rows, words, seed).tolist()]


class Rows(torch.utils.data.Dataset):
    """Rows of tokens that are their own labels."""

    def __init__(self, rows: int = 32) -> None:
        self.tokens = tokens(rows)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[i], "labels": self.tokens[i]}


def same(got: Any, want: Any, path: str = "") -> None:
    """Asserts that two trees of dicts, lists, tensors and values have the same keys and the same bits."""
    assert type(got) is type(want), path
    if isinstance(want, Mapping):
        assert set(got) == set(want), f"{path}: {sorted(set(got) ^ set(want))[:3]}"
        for key in want:
            same(got[key], want[key], f"{path}.{key}")
    elif isinstance(want, list | tuple):
        assert len(got) == len(want), path
        for i, (one, other) in enumerate(zip(got, want, strict=True)):
            same(one, other, f"{path}.{i}")
    elif isinstance(want, Tensor):
        assert got.dtype == want.dtype and got.shape == want.shape and torch.equal(got, want), path
    else:
        assert got == want, path


def values(model: nn.Module, optimizer: Any = None) -> dict[str, Any]:
    """Returns copies of a model's parameters, buffers and states, and of its optimizer's state."""
    tree = {
        "model": dict(model.state_dict()),
        "optimizer": {} if optimizer is None else optimizer.state_dict()["state"],
    }
    return torch.utils._pytree.tree_map_only(Tensor, Tensor.clone, tree)


def differs(got: Mapping[str, Any], want: Mapping[str, Any]) -> bool:
    """Whether any parameter of two results of `values` differs: training has changed it."""
    return any(not torch.equal(t, want["model"][name]) for name, t in got["model"].items() if name in want["model"])


def require_quantized(model: nn.Module, recipe: Any, layers: int) -> None:
    """Asserts that the last calls of so many layers ran by a recipe, in the products of a training step."""
    report = dt.report(model)
    assert len(report.quantized) == layers, report
    assert {layer.recipe for layer in report.quantized} == {recipe}, report


class Recorder:
    """Records the arguments of a model's calls in training, so that a plain loop can make the same calls."""

    def __init__(self, model: nn.Module) -> None:
        self.calls: list[dict[str, Any]] = []
        self.hook = model.register_forward_pre_hook(self._record, with_kwargs=True)

    def _record(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if module.training:
            self.calls.append({name: t.clone() for name, t in kwargs.items() if isinstance(t, Tensor)} | {"args": args})
