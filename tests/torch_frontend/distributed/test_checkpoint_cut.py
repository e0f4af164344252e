"""Checkpoints of modules that are cut over a tensor-parallel group: any other sharding reads them."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import diptych.torch as dt
from diptych.torch.distributed import checkpoint_tensors as tensors
from torch_frontend.distributed.checkpoint_cases import content, differing, optimizer_of
from torch_frontend.distributed.cut_checkpoints import CASES, Layout, alone, cut_model, moved, resumed, said
from torch_frontend.ranks import here, needs_gloo

pytestmark = pytest.mark.sampled

DEVICES = ("cpu", "cuda")  # of ranks


def of_rank_alone(names: list[str]) -> list[str]:
    return [name for name in names if "scale_states" not in name]


# --- where a rank's part lies ---


@pytest.mark.parametrize("parts, cut, shards", list(itertools.product((1, 2, 3), (1, 2, 4), (1, 3, 5))))
def test_runs_are_the_indices_of_a_part(parts, cut, shards):
    """The oracle cuts the indices themselves as torch.chunk does."""
    for extent, rank, shard in itertools.product((0, 1, 5, 12, 24, 31), range(cut), range(shards)):
        whole = torch.arange(extent * parts)
        mine = torch.cat([_chunk(part, cut, rank) for part in whole.view(parts, extent)])
        runs = tensors._kept(tensors._kept([(0, extent * parts)], parts, rank, cut), 1, shard, shards)
        assert all(number > 0 for _, number in runs)
        found = [i for first, number in runs for i in range(first, first + number)]
        assert found == _chunk(mine, shards, shard).tolist()


def _chunk(t: torch.Tensor, ranks: int, rank: int) -> torch.Tensor:
    return dict(enumerate(t.chunk(ranks))).get(rank, t[:0])


def test_views_are_rectangles_of_the_whole_tensor():
    whole = torch.arange(12 * 10).view(12, 10)
    rows, columns = [0, 1, 6, 7, 8], [2, 3, 4, 9]
    local = whole[rows][:, columns].clone()
    made = tensors.Pieces.of("t", local, [12, 10], [[(0, 2), (6, 3)], [(2, 3), (9, 1)]], {0})
    assert made.shape == (12, 10) and made.dtype == whole.dtype and len(made.views) == 4
    for (row, column), view in made.views.items():
        assert torch.equal(view, whole[row : row + view.shape[0], column : column + view.shape[1]])
        view.zero_()
    assert not local.any()  # the views share its memory, and cover it
    with pytest.raises(tensors.CheckpointError, match=r"t \[12, 10\]: this rank holds a part \[5, 4\], .* \[2, 10\]"):
        tensors.Pieces.of("t", local, [12, 10], [[(0, 2)], [(0, 10)]], {0})
    with pytest.raises(NotImplementedError, match="of Pieces"):
        made + 1


# --- two ranks ---


def on_rank(rank: int, groups: Any) -> dict[str, Any]:
    root = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(root)
    folder = Path(str(root[0]))
    made: dict[str, Any] = {"folder": str(folder)}
    of_first = dist.new_group([0])
    for name in CASES:
        made[name] = resumed(name, 2, folder / name)
        made[f"{name}, to fsdp"] = moved(name, 1, folder / name, folder / f"{name}, fsdp")
        made[f"{name}, from fsdp"] = moved(name, 2, folder / f"{name}, fsdp")
        if rank == 0:
            made[f"{name}, alone"] = alone(name, folder / f"{name}, alone", of_first)
        dist.barrier()
        made[f"{name}, from one"] = moved(name, 2, folder / f"{name}, alone")
    made["errors"] = errors(rank, of_first, folder)
    return made


def errors(rank: int, of_first: Any, folder: Path) -> dict[str, str]:
    group = dist.group.WORLD
    net, larger = cut_model("delayed", group), cut_model("delayed", group, ffn=64)
    net, larger = net.to(here()), larger.to(here())
    before = content(larger)
    found = {"shape": said(lambda: dt.parallel.load(folder / "delayed", larger))}
    assert differing(content(larger), before) == []
    if rank == 0:
        found["group"] = said(lambda: dt.parallel.save(folder / "errors", net, step=1, group=of_first))
        found["exported"] = said(lambda: dt.parallel.export(folder / "errors", net, group=of_first))
    unnamed = dt.Linear(8, 8, tp_size=2, parallel_mode="row", device="meta")
    found["unnamed"] = said(lambda: dt.parallel.save(folder / "errors", unnamed, step=1))
    found["parametrized"] = said(lambda: dt.parallel.save(folder / "errors", parametrized(group), step=1))
    optimizer, whole = optimizer_of(net), cut_model("delayed").to(here())
    of_whole = optimizer_of(whole)
    for p, kept in [(p, of.state) for of in (optimizer, of_whole) for g in of.param_groups for p in g["params"]]:
        kept[p] = {"row": torch.ones(3, device=p.device)}
    found["state"] = said(lambda: dt.parallel.save(folder / "errors", net, optimizer, step=1))
    found["nothing"] = str((folder / "errors").exists())
    if rank == 0:
        dt.parallel.save(folder / "rows", whole, of_whole, step=1, group=of_first)
    dist.barrier()
    found["room"] = said(lambda: dt.parallel.load(folder / "rows", net, optimizer_of(net)))
    return found


def parametrized(group: Any) -> nn.Module:
    return torch.nn.utils.parametrizations.weight_norm(dt.Linear(8, 8, parallel_mode="row", tp_group=group))


@needs_gloo
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_resume_with_the_same_bits(name, ranks):
    for made in ranks:
        assert made[name]["loaded"] == [] and made[name]["resumed"] == []


@needs_gloo
@pytest.mark.parametrize("name", CASES)
def test_other_shardings_of_two_ranks(name, ranks):
    for made in ranks:
        assert of_rank_alone(differing(made[f"{name}, to fsdp"]["loaded"], made[name]["whole"])) == []
        assert of_rank_alone(differing(made[f"{name}, from fsdp"]["loaded"], made[f"{name}, to fsdp"]["whole"])) == []
        assert differing(made[f"{name}, from one"]["loaded"], ranks[0][f"{name}, alone"]) == []


@needs_gloo
def test_ranks_of_a_group_load_the_same_scales(ranks):
    """FSDP2's ranks have scales of their own, and the ranks of a cut layer one: that of the largest amax."""
    one, other = (made["delayed, to fsdp"]["whole"] for made in ranks)
    histories = [name for name in one if name.endswith(".amax_history")]
    assert any(not torch.equal(one[name], other[name]) for name in histories)
    for made in ranks:
        loaded = made["delayed, from fsdp"]["loaded"]
        for name in histories:
            scale = name.replace("amax_history", "scale")
            assert torch.equal(loaded[name], torch.maximum(one[name], other[name])), name
            assert torch.equal(loaded[scale], torch.minimum(one[scale], other[scale])), scale


@needs_gloo
@pytest.mark.parametrize("name", CASES)
def test_one_process_takes_the_checkpoint_and_the_exported_file(name, ranks):
    safetensors = pytest.importorskip("safetensors.torch")
    net = cut_model(name, seed=1)
    optimizer = optimizer_of(net)
    dt.parallel.load(Path(ranks[0]["folder"]) / name, net, optimizer)
    whole = ranks[0][name]["whole"]
    assert of_rank_alone(differing(content(net, optimizer), whole)) == []
    found = safetensors.load_file(Path(ranks[0]["folder"]) / name / "model.safetensors")
    assert found.keys() == cut_model(name).state_dict().keys()
    assert differing(found, {key: whole[key] for key in found}) == []


@needs_gloo
def test_errors_are_named_on_all_ranks(ranks):
    one, other = (made["errors"] for made in ranks)
    assert {k: v for k, v in one.items() if k in other} == other
    assert "model.2.fc1_weight is torch.float32[120, 64] in the checkpoint and torch.float32[128, 64]" in one["shape"]
    assert "model.0.weight is sharded over the ranks [0, 1], the group has [0]" in one["group"]
    assert "0.weight is sharded over the ranks [0, 1], the group has [0]" in one["exported"]
    assert "tp_size is 2, and there is no group; call set_tensor_parallel_group" in one["unnamed"]
    assert "is cut over 2 ranks, and its weight is no parameter of its own (parametrized)" in one["parametrized"]
    assert "the optimizer's row of 0.weight is a plain tensor [3] on each rank" in one["state"]
    assert one["nothing"] == "False"
    assert (
        "optimizer.state.0.weight.row is [3] in the checkpoint, and 0.weight [64, 64] is cut over ranks" in one["room"]
    )


# --- four ranks ---


def on_four(rank: int, groups: Any, folder: str, name: str) -> dict[str, Any]:
    root = Path(folder)
    return {"2x2": moved(name, 2, root / "1", root / "2x2"), "4": moved(name, 4, root / "2x2", root / "4")}


def on_two(rank: int, groups: Any, folder: str, name: str) -> dict[str, Any]:
    return moved(name, 2, Path(folder) / "4")


@needs_gloo
@pytest.mark.parametrize("name", ["delayed", pytest.param("fp8-current", marks=pytest.mark.slow)])
def test_four_ranks_cut_and_shard(name, pool, tmp_path):
    before = alone(name, tmp_path / "1")
    four = pool.run(f"{__name__}:on_four", str(tmp_path), name, size=4, into=tmp_path / "made")
    two = pool.run(f"{__name__}:on_two", str(tmp_path), name, into=tmp_path / "made")
    for made in four:
        assert differing(made["2x2"]["loaded"], before) == []
        assert of_rank_alone(differing(made["4"]["loaded"], four[0]["2x2"]["whole"])) == []
    for made in two:
        assert of_rank_alone(differing(made["loaded"], four[0]["4"]["whole"])) == []
    net = cut_model(name, seed=1)
    optimizer = optimizer_of(net)
    dt.parallel.load(tmp_path / "2x2", net, optimizer)
    assert of_rank_alone(differing(content(net, optimizer), four[0]["2x2"]["whole"])) == []


def resumed_and_styled(rank: int, groups: Any, folder: str, name: str) -> dict[str, Any]:
    made = resumed(name, 2, Path(folder) / "resumed", head=2)
    styled(name, Path(folder) / "styled")
    return made


def tied(net: nn.Module) -> nn.Module:
    """A model whose first weight has two names, with a block that is compiled."""
    net.add_module("tied", nn.Module())
    net.tied.weight = net[0].weight
    net[2] = torch.compile(net[2])
    return net


def styled(name: str, folder: Path) -> None:
    """Saves and loads parameters that are DTensors over the tensor-parallel ranks, and then sharded by FSDP2."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    layout = Layout(2)

    def sharded(seed: int) -> nn.Module:
        net = cut_model(name, layout.group, seed).to(here())
        net[3].weight = nn.Parameter(distribute_tensor(net[3].weight.detach(), layout.mesh["tp"], [Shard(0)]))
        for block in net:
            for key, how in block.cuts().items() if hasattr(block, "cuts") else ():
                part = block._parameters[key].detach()
                shape = torch.Size([n * (2 if dim == how.dim else 1) for dim, n in enumerate(part.shape)])
                stride = torch.empty(shape, device="meta").stride()
                place = Shard(how.dim) if how.parts == 1 else _StridedShard(how.dim, split_factor=how.parts)
                t = DTensor.from_local(part, layout.mesh["tp"], [place], shape=shape, stride=stride)
                block._parameters[key] = nn.Parameter(t)
            fully_shard(block, mesh=layout.mesh["dp"])
        return net

    dt.parallel.save(folder / "copies", tied(cut_model(name, layout.group).to(here())), step=1)
    dt.parallel.save(folder, sharded(0), step=1)
    net = sharded(1)
    dt.parallel.load(folder, net)
    dt.parallel.save(folder, net, step=2)
    dt.parallel.export(folder / "model.safetensors", net)


@needs_gloo
def test_four_ranks_resume_and_take_dtensors_of_both_meshes(pool, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    name = "delayed"
    four = pool.run(f"{__name__}:resumed_and_styled", str(tmp_path), name, size=4, into=tmp_path / "made")
    for made in four:
        assert made["loaded"] == [] and made["resumed"] == []
    found = safetensors.load_file(tmp_path / "resumed" / "model.safetensors")
    assert differing(found, {key: four[0]["whole"][key] for key in found}) == []
    whole = cut_model(name).state_dict()
    assert differing(safetensors.load_file(tmp_path / "styled" / "model.safetensors"), whole) == []
    for step in (1, 2):
        net = cut_model(name, seed=1)
        dt.parallel.load(tmp_path / "styled", net, step=step)
        assert differing(net.state_dict(), whole) == []
    net, same = (tied(cut_model(name, seed=seed)) for seed in (1, 0))
    dt.parallel.load(tmp_path / "styled" / "copies", net)  # of two ranks, which have them twice
    assert differing(net.state_dict(), same.state_dict()) == []


@needs_gloo
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_fsdp_cuts_across_gate_and_value(name, pool, tmp_path):
    """Three ranks share a part whose halves end within the second one's rows."""
    alone(name, tmp_path / "1")
    six = pool.run(f"{__name__}:on_six", str(tmp_path), name, size=6, into=tmp_path / "made")
    net = cut_model(name, seed=1)
    optimizer = optimizer_of(net)
    dt.parallel.load(tmp_path / "2x3", net, optimizer)
    assert of_rank_alone(differing(content(net, optimizer), six[0]["whole"])) == []
    for made in six:
        assert of_rank_alone(differing(made["loaded"], alone(name, tmp_path / "again"))) == []


def on_six(rank: int, groups: Any, folder: str, name: str) -> dict[str, Any]:
    return moved(name, 2, Path(folder) / "1", Path(folder) / "2x3")
