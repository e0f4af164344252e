"""`ParallelStyle`s where they do not fit: named errors before anything is sent, and modules left as they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import diptych.torch as dt
from torch_frontend.cut_layers import RECIPES, error_of
from torch_frontend.distributed.test_styles import mesh_of
from torch_frontend.ranks import needs_gloo

pytestmark = needs_gloo


def _apply(style: Any, module: Any, mesh: Any) -> Any:
    from torch.distributed.tensor.parallel import parallelize_module

    return parallelize_module(module, mesh, style)


def _held() -> Any:
    with dt.quantized_model_init(recipe=RECIPES["mxfp8"]):
        return dt.Linear(64, 64)


def _torchs_style(groups: Any) -> Any:
    from torch.distributed.tensor.parallel import ColwiseParallel

    return _apply(ColwiseParallel(), dt.Linear(64, 64), mesh_of(groups))(torch.ones(32, 64))


def _uneven(groups: Any) -> Any:
    from torch.distributed.tensor import Shard, distribute_tensor

    module = _apply(P.ColwiseParallel(input_layouts=_shard(0)), dt.Linear(64, 64), mesh_of(groups))
    return module(distribute_tensor(torch.ones(5, 64), mesh_of(groups), [Shard(0)], src_data_rank=None))


def _plain_parameters(groups: Any) -> Any:
    module = _apply(P.ColwiseParallel(), dt.Linear(64, 64), mesh_of(groups))
    plain = {name: p.to_local() for name, p in module.named_parameters()}
    return torch.func.functional_call(module, plain, (torch.ones(32, 64),))


def _grid(groups: Any) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))


P = dt.parallel
MISUSE: dict[str, tuple[Any, str, str]] = {
    "torch's linear": (
        lambda g: _apply(P.ColwiseParallel(), nn.Linear(4, 4), mesh_of(g)), "TypeError", "torch's own styles",
    ),
    "experts": (lambda g: _apply(P.ColwiseParallel(), dt.GroupedLinear(2, 64, 64), mesh_of(g)), "TypeError", "cuts"),
    "an mlp by column": (
        lambda g: _apply(P.ColwiseParallel(), dt.LayerNormMLP(64, 64), mesh_of(g)), "TypeError", "got LayerNormMLP",
    ),
    "a norm by row": (
        lambda g: _apply(P.RowwiseParallel(), dt.LayerNormLinear(64, 64), mesh_of(g)), "TypeError", "LayerNormLinear",
    ),
    "a linear as a pair": (
        lambda g: _apply(P.PairwiseParallel(), dt.Linear(64, 64), mesh_of(g)), "TypeError", "cuts LayerNormMLP",
    ),
    "twice": (
        lambda g: _apply(P.RowwiseParallel(), _apply(P.RowwiseParallel(), dt.Linear(64, 64), mesh_of(g)), mesh_of(g)),
        "TypeError", "cut already",
    ),
    "with a group": (
        lambda g: _apply(P.RowwiseParallel(), dt.Linear(64, 64, tp_group=g["data"], parallel_mode="row"), mesh_of(g)),
        "TypeError", "cut already",
    ),
    "two dimensions": (
        lambda g: P.RowwiseParallel()._apply(dt.Linear(64, 64), _grid(g)), "TypeError", "2 dimensions",
    ),
    "held": (lambda g: _apply(P.RowwiseParallel(), _held(), mesh_of(g)), "NotImplementedError", "held quantized"),
    "fused gradients": (
        lambda g: _apply(P.RowwiseParallel(), dt.Linear(64, 64, fuse_wgrad_accumulation=True), mesh_of(g)),
        "NotImplementedError", "fuse_wgrad_accumulation",
    ),
    "extents": (lambda g: _apply(P.RowwiseParallel(), dt.Linear(65, 64), mesh_of(g)), "ValueError", "in_features=65"),
    "extents of an mlp": (
        lambda g: _apply(P.PairwiseParallel(), dt.LayerNormMLP(64, 65), mesh_of(g)), "ValueError", "ffn_hidden_size=65",
    ),
    "norms with layers": (
        lambda g: _apply(P.SequenceParallel(), nn.Sequential(dt.Linear(4, 4)), mesh_of(g)), "TypeError", "layouts",
    ),
    "an input's layout": (lambda g: P.ColwiseParallel(input_layouts=_shard(2)), "ValueError", "input_layouts"),
    "an output's layout": (lambda g: P.ColwiseParallel(output_layouts=_shard(0)), "ValueError", "output_layouts"),
    "a row's input": (lambda g: P.RowwiseParallel(input_layouts=_shard(0)), "ValueError", "input_layouts"),
    "a row's output": (lambda g: P.RowwiseParallel(output_layouts=_shard(-1)), "ValueError", "output_layouts"),
    "a pair's layout": (lambda g: P.PairwiseParallel(layouts=_shard(-1)), "ValueError", "layouts"),
    "a matrix cut along its columns": (
        lambda g: _apply(P.ColwiseParallel(input_layouts=_shard(1)), dt.Linear(64, 64), mesh_of(g))(torch.ones(32, 64)),
        "ValueError", "[batch, tokens, features]",
    ),
    "tokens that ranks do not share evenly": (_uneven, "ValueError", "no multiple of the 2 tensor-parallel ranks"),
    "plain parameters": (_plain_parameters, "TypeError", "found a plain Tensor"),
    "torch's style": (_torchs_style, "NotImplementedError", "DTensor"),
}  # fmt: skip


def _shard(dim: int) -> Any:
    from torch.distributed.tensor import Shard

    return Shard(dim)


def refused(rank: int, groups: Any) -> dict[str, tuple[str, str]]:
    made = {}
    for what, (call, _, _) in MISUSE.items():
        made[what] = error_of(lambda: call(groups), RECIPES["current"])[:2]  # noqa: B023
    return made


def test_misuse(pool, tmp_path):
    for made in pool.run(f"{__name__}:refused", into=tmp_path / "made"):
        for what, (_, error, says) in MISUSE.items():
            classes, text = made[what]
            assert error in classes.split() and says in text, (what, classes, text)


def unchanged(rank: int, groups: Any) -> bool:
    """A refused module is as it was."""
    module = dt.LayerNormMLP(64, 65)
    with pytest.raises(ValueError, match="ffn_hidden_size=65"):
        _apply(P.PairwiseParallel(), module, mesh_of(groups))
    assert module.tp_size == 1 and module.ffn_hidden_size == 65 and not module._forward_pre_hooks
    assert all(type(p) is nn.Parameter for p in module.parameters())
    return True


def test_a_refused_module_is_unchanged(pool, tmp_path):
    assert pool.run(f"{__name__}:unchanged", into=tmp_path / "made") == [True, True]
