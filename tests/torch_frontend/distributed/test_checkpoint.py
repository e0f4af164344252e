"""Checkpoints: a resumed run has the bits of an uninterrupted one, other ranks get the same, errors change nothing."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import diptych.torch as dt
from diptych.common.errors import CheckpointError, CheckpointWarning
from torch_frontend.distributed.checkpoint_cases import (
    TRAINED,
    content,
    differing,
    model,
    optimizer_of,
    sharded,
    train,
)
from torch_frontend.ranks import here, needs_gloo

DEVICES = ("cpu", "cuda")  # of ranks


def trained(name: str = "delayed", steps: int = 2, **options: Any) -> tuple[nn.Module, Any]:
    net = model(name, **options)
    optimizer = optimizer_of(net)
    train(net, optimizer, range(steps), name)
    return net, optimizer


@pytest.mark.filterwarnings("ignore:.*rounds to the value")
@pytest.mark.parametrize("held", [False, True, "master"])
@pytest.mark.parametrize("name", list(TRAINED))
def test_a_resumed_run_has_the_same_bits(name, held, tmp_path):
    def made(seed: int) -> nn.Module:
        net = model(name, seed, held=bool(held))
        for p in net.parameters():
            if held == "master" and isinstance(p, dt.QuantizedParameter):
                p.main_param = p.dequantize().float()
        return net

    net = made(0)
    optimizer = optimizer_of(net)
    train(net, optimizer, range(2), name)
    before = content(net, optimizer)
    assert dt.parallel.save(tmp_path, net, optimizer, step=2, extra={"seen": 64}) == tmp_path / "step-000002"
    assert differing(content(net, optimizer), before) == []
    train(net, optimizer, range(2, 4), name)

    resumed = made(1)  # it was not prepared, and its optimizer has no state
    again = optimizer_of(resumed)
    next(iter(resumed.parameters())).grad = None
    assert dt.parallel.load(tmp_path, resumed, again) == (2, {"seen": 64})
    assert differing(content(resumed, again), before) == []
    train(resumed, again, range(2, 4), name)
    assert differing(content(resumed, again), content(net, optimizer)) == []


def test_wrappers_do_not_change_names(tmp_path):
    net, optimizer = trained()
    dt.parallel.save(tmp_path, torch.compile(net), optimizer, step=2)
    blocks = model(seed=1)
    again = optimizer_of(blocks)
    blocks[1] = torch.compile(blocks[1])
    dt.parallel.load(tmp_path, blocks, again)
    found = {name.replace("_orig_mod.", ""): t for name, t in content(blocks, again).items()}
    assert differing(found, content(net, optimizer)) == []


def test_gradients_and_states_in_the_way(tmp_path):
    """A model in the middle of a run goes back, though it has gradients and its optimizer has a state."""
    net, optimizer = trained()
    before = content(net, optimizer)
    dt.parallel.save(tmp_path, net, optimizer, step=2)
    train(net, optimizer, range(2, 4))
    net(torch.randn(32, 64)).sum().backward()
    dt.parallel.load(tmp_path, net, optimizer)
    assert differing(content(net, optimizer), before) == []


class Summing(torch.optim.Optimizer):
    """Keeps a number and a float32 sum for each weight, and its rate as a tensor."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": torch.tensor(lr)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            kept = self.state[p] or {"count": 0, "sum": torch.zeros(p.shape, dtype=torch.float32)}
            self.state[p] = {"count": kept["count"] + 1, "sum": kept["sum"] + p.grad.float()}
            p -= self.state[p]["sum"] * self.param_groups[0]["lr"]


def test_an_optimizer_with_states_of_its_own_kinds(tmp_path):
    net, again = model("nvfp4"), model("nvfp4", seed=1)
    optimizer, other = Summing(net.parameters(), 0.01), Summing(again.parameters(), 1.0)
    for _ in range(2):
        net(torch.ones(32, 64, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
    dt.parallel.save(tmp_path, net, optimizer, step=1)
    dt.parallel.load(tmp_path, again, other)
    for p, q in zip(net.parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q) and other.state[q]["count"] == 2 and other.state[q]["sum"].dtype == torch.float32
        assert torch.equal(optimizer.state[p]["sum"], other.state[q]["sum"])
    assert other.param_groups[0]["lr"].item() == pytest.approx(0.01)


def test_steps_that_are_kept(tmp_path):
    net, optimizer = trained()
    for step in (1, 2, 3):
        dt.parallel.save(tmp_path, net, optimizer, step=step, keep=2)
    names = lambda: sorted(p.name for p in tmp_path.iterdir())  # noqa: E731
    assert names() == ["latest", "step-000002", "step-000003"]
    dt.parallel.save(tmp_path, net, step=2, extra="again")  # after a return to step 1
    assert names() == ["latest", "step-000002-1", "step-000003"]
    assert dt.parallel.load(tmp_path, net) == (2, "again")
    assert dt.parallel.load(tmp_path, net, optimizer, step=3).step == 3
    dt.parallel.save(tmp_path, net, step=2, keep=1)
    assert names() == ["latest", "step-000002-2"]


def test_unfinished_folders_are_removed_and_never_loaded(tmp_path):
    net, _ = trained()
    left = [tmp_path / ".step-000007.writing", tmp_path / f".latest.{'0' * 16}.partial"]
    left[0].mkdir()
    left[1].write_text("step")
    (tmp_path / ".other").mkdir()
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        dt.parallel.load(tmp_path, net)
    dt.parallel.save(tmp_path, net, step=1)
    assert not any(p.exists() for p in left) and (tmp_path / ".other").exists()
    (tmp_path / "latest").unlink()
    assert dt.parallel.load(tmp_path, net).step == 1
    (tmp_path / "latest").write_text("step-000009\n")
    with pytest.warns(CheckpointWarning, match=r"names 'step-000009'.*step-000001 is the newest"):
        assert dt.parallel.load(tmp_path, net).step == 1


class Other(nn.Sequential):
    pass


def _other(kind: str) -> tuple[nn.Module, Any]:
    net = model(seed=1)
    if kind == "more":
        net.append(nn.Linear(2, 2))
    if kind == "fewer":
        del net[2]
    if kind == "shape":
        net[2] = nn.Linear(64, 32)
    if kind == "dtype":
        net[2].bfloat16()
    if kind == "meta":
        net[2].to("meta")
    if kind == "recipe":
        dt.prepare(net, TRAINED["nvfp4"])
    if kind == "group":
        return net, torch.optim.AdamW(net.parameters())
    if kind == "stranger":
        return net, torch.optim.AdamW([*net.parameters(), nn.Parameter(torch.zeros(3))])
    return net, torch.optim.SGD(net.parameters()) if kind == "optimizer" else optimizer_of(net)


@pytest.mark.parametrize(
    "kind, message",
    [
        ("more", "it lacks model.3.bias, model.3.weight"),
        ("fewer", "it holds model.2.bias, model.2.weight, unlike this run"),
        ("shape", r"model.2.weight is torch.float32\[64, 64\] in the checkpoint and torch.float32\[32, 64\] in"),
        ("dtype", r"model.2.bias is torch.float32\[64\] in the checkpoint and torch.bfloat16\[64\] in"),
        ("meta", "model.2.bias, model.2.weight here lie on meta: call to_empty"),
        ("recipe", "lacks .*rng_state, which this model was prepared with"),
        ("group", "the optimizer's weights differ: its groups have other weights"),
        ("stranger", r"the optimizer steps a tensor \[3\] that is no weight of the model"),
        ("optimizer", "the optimizer was AdamW, here it is SGD"),
    ],
)
def test_nothing_is_loaded_where_names_or_forms_differ(kind, message, tmp_path):
    dt.parallel.save(tmp_path, *trained(), step=2)
    net, optimizer = _other(kind)
    before = content(net[:2])
    with pytest.raises(CheckpointError, match=message) as caught:
        dt.parallel.load(tmp_path, net, optimizer)
    assert str(tmp_path / "step-000002") in str(caught.value)
    assert differing(content(net[:2]), before) == [] and not optimizer.state


def test_missing_and_damaged_files(tmp_path):
    net, optimizer = trained()
    with pytest.raises(CheckpointError, match="no such folder of checkpoints, it is nothing"):
        dt.parallel.load(tmp_path / "none", net)
    with pytest.raises(CheckpointError, match=r"File exists"):
        (tmp_path / "file").write_text("")
        dt.parallel.save(tmp_path / "file", net, step=1)
    dt.parallel.save(tmp_path, net, step=2)
    with pytest.raises(CheckpointError, match="holds no checkpoint of step 3, but of 2"):
        dt.parallel.load(tmp_path, net, step=3)
    with pytest.raises(CheckpointError, match="it was saved without an optimizer"):
        dt.parallel.load(tmp_path, net, optimizer)
    for name, said in (("__0_0.distcp", "damaged: it has"), ("rank-00000.pt", "cannot be read")):
        path = tmp_path / "step-000002" / name
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        before = content(net)
        with pytest.raises(CheckpointError, match=said):
            dt.parallel.load(tmp_path, net)
        assert differing(content(net), before) == []
        path.write_bytes(whole)
    assert dt.parallel.load(tmp_path, net).step == 2


def test_wrong_arguments(tmp_path):
    net, _ = trained()
    for wrong, error in ({"step": 1.5}, TypeError), ({"step": -1}, ValueError), ({"step": 1, "keep": 0}, ValueError):
        with pytest.raises(error):
            dt.parallel.save(tmp_path, net, **wrong)
    with pytest.raises(CheckpointError, match=r"header.pt: cannot be read"):
        dt.parallel.save(tmp_path, net, step=1, extra=Other())
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        dt.parallel.load(tmp_path, net)


@pytest.mark.parametrize("held", [False, True])
def test_an_exported_file_is_one_of_safetensors(held, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    net, _ = trained("fp8-current", held=held)
    net.register_buffer("small", torch.ones(3, dtype=torch.bool))
    net[2].weight = net[2].weight  # plain weights stay as they are
    tied = nn.ModuleDict({"one": net, "two": net[2]}).bfloat16()
    dt.parallel.export(tmp_path / "model.safetensors", tied)
    found = safetensors.load_file(tmp_path / "model.safetensors")
    wanted = {k: t.dequantize() if isinstance(t, dt.QuantizedTensor) else t for k, t in tied.state_dict().items()}
    assert differing(found, {k: t for k, t in wanted.items() if "scale_states" not in k}) == []
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]
    with pytest.raises(CheckpointError, match="cannot be written"):
        dt.parallel.export(tmp_path, tied)
    tied.register_buffer("complex", torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(CheckpointError, match=r"complex is torch.complex64"):
        dt.parallel.export(tmp_path / "other", tied)


def test_states_of_other_ranks():
    from diptych.torch.distributed.checkpoint_entries import combined

    def states(amax: float, seed: int) -> dict[str, torch.Tensor]:
        return {
            "a.scale_states.input.scale": torch.tensor([448 / amax]),
            "a.scale_states.input.amax_history": torch.tensor([amax, 1.0]),
            "a.scale_states.input.fp8_max": torch.tensor([448.0]),
            "a.rng_state": torch.tensor([seed, 0, 8, 0], dtype=torch.int32),
        }

    both = [states(2.0, 1), states(4.0, 2)]
    found = [combined(both, rank) for rank in range(5)]
    assert all(f["a.scale_states.input.scale"].item() == 112 for f in found)
    assert all(f["a.scale_states.input.amax_history"].tolist() == [4.0, 1.0] for f in found)
    generators = [tuple(f["a.rng_state"].tolist()) for f in found]
    assert len(set(generators)) == 5 and generators[0] == (1, 0, 8, 0) and generators[1] == (2, 0, 8, 0)
    shared = [combined([states(2.0, 1)] * 2, rank)["a.rng_state"].tolist() for rank in range(5)]
    assert shared == [[1, 0, 8, 0]] * 5
    # Pairs of ranks that share a module continue one generator, and no two pairs the same.
    groups = [{"a": [rank // 2 * 2, rank // 2 * 2 + 1]} for rank in range(8)]
    pairs = [combined(both, rank, cut)["a.rng_state"].tolist() for rank, cut in enumerate(groups)]
    assert pairs[::2] == pairs[1::2] and len({tuple(p) for p in pairs}) == 4
    # Other modules of theirs, which each of a pair has whole, do so too.
    whole = [combined(both, rank, {"b": cut["a"]})["a.rng_state"].tolist() for rank, cut in enumerate(groups)]
    assert whole == pairs
    # Those of two pairs, on four ranks that share nothing.
    apart = [combined([both[0], both[0], both[1], both[1]], rank)["a.rng_state"].tolist() for rank in range(4)]
    assert len({tuple(a) for a in apart}) == 4


# --- two ranks ---


def said(call: Any) -> str:
    try:
        call()
    except (CheckpointError, ValueError) as e:
        return f"{type(e).__name__}: {e}"
    return "no error"


def on_rank(rank: int, groups: Any) -> dict[str, Any]:
    root = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(root)
    folder = Path(str(root[0]))
    made: dict[str, Any] = {"folder": str(folder)}
    for name in ("delayed", "nvfp4"):
        for gathered in (False, True):
            case = f"{name}{', gathered' * gathered}"
            net, optimizer = sharded(name, rank, gathered=gathered)
            train(net, optimizer, range(2), name, rank)
            saved = content(net, optimizer)
            dt.parallel.save(folder / case, net, optimizer, step=2, extra=rank)
            dt.parallel.export(folder / case / "model.safetensors", net)
            train(net, optimizer, range(2, 4), name, rank)
            resumed, again = sharded(name, rank, seed=1, gathered=gathered)
            made[f"{case}, returned"] = list(dt.parallel.load(folder / case, resumed, again))
            made[f"{case}, loaded"] = differing(content(resumed, again), saved)
            train(resumed, again, range(2, 4), name, rank)
            made[f"{case}, resumed"] = differing(content(resumed, again), content(net, optimizer))
            made[f"{case}, saved"] = saved
    alone = dist.new_group([0])
    net, optimizer = trained()
    if rank == 0:
        dt.parallel.save(folder / "alone", net, optimizer, step=2, group=alone)
    dist.barrier()
    both, again = sharded("delayed", rank, seed=1)
    dt.parallel.load(folder / "alone", both, again)
    made["1 to 2"] = differing(content(both, again), content(net, optimizer))
    wrapped = model(seed=1).to(here())
    again = optimizer_of(wrapped)
    dt.parallel.load(folder / "alone", nn.parallel.DistributedDataParallel(wrapped), again)
    made["1 to 2"] += differing(content(wrapped, again), content(net, optimizer))
    made["errors"] = errors(rank, alone, folder / "errors", net, both)
    return made


def errors(rank: int, alone: Any, folder: Path, net: nn.Module, both: nn.Module) -> dict[str, str]:
    """Returns each rank's error message for calls of save and load that go wrong on one rank alone."""
    found = {"step": said(lambda: dt.parallel.save(folder, net, step=rank))}
    extra = {"step": 1, "extra": Other() if rank == 0 else None}
    found["extra"] = said(lambda: dt.parallel.save(folder, net, **extra))
    found["nothing"] = said(lambda: dt.parallel.load(folder, net))
    dt.parallel.save(folder, net, step=1)
    larger = nn.ModuleList([net]) if rank == 1 else net
    found["keys"] = said(lambda: dt.parallel.load(folder, larger))
    found["group"] = said(lambda: dt.parallel.save(folder, both, step=2, group=alone))
    path = folder if rank == 0 else folder / "other"
    found["export"] = said(lambda: dt.parallel.export(path, both))
    return found


@needs_gloo
def test_two_ranks_resume_and_one_takes_their_checkpoint(ranks):
    assert [made["1 to 2"] for made in ranks] == [[], []]
    for name in ("delayed", "nvfp4"):
        for case in (name, f"{name}, gathered"):
            for made in ranks:
                assert made[f"{case}, returned"] == [2, 0]
                assert made[f"{case}, loaded"] == [] and made[f"{case}, resumed"] == []
            net = model(name, seed=1)
            optimizer = optimizer_of(net)
            dt.parallel.load(Path(ranks[0]["folder"]) / case, net, optimizer)
            found, (one, other) = content(net, optimizer), (made[f"{case}, saved"] for made in ranks)
            unlike = differing(one, other)
            assert differing(found, one) == [n for n in differing(found, one) if n in unlike and "rng" not in n]
            for key in [n for n in unlike if n.endswith("amax_history")]:
                assert torch.equal(found[key], torch.maximum(one[key], other[key]))


@needs_gloo
def test_two_ranks_export_one_file(ranks):
    safetensors = pytest.importorskip("safetensors.torch")
    for case in ("delayed", "nvfp4, gathered"):
        found = safetensors.load_file(Path(ranks[0]["folder"]) / case / "model.safetensors")
        saved = ranks[0][f"{case}, saved"]
        assert set(found) == set(model().state_dict()) - {k for k in saved if "_state" in k}
        assert differing(found, {name: saved[name] for name in found}) == []


@needs_gloo
def test_an_error_on_one_rank_is_named_on_both(ranks):
    one, other = (made["errors"] for made in ranks)
    for kind in ("step", "extra", "nothing", "keys", "export"):
        assert one[kind] == other[kind]
    assert "ranks differ in folder, step, keep or optimizer" in one["step"]
    assert "(rank 0)" in one["step"] and "(rank 1)" in one["step"]
    assert "header.pt: cannot be read" in one["extra"] and "(rank 0)" in one["extra"]
    assert "holds no complete checkpoint" in one["nothing"]
    assert "it lacks model.0.0.bias" in one["keys"] and one["keys"].endswith("(rank 1)")
    assert "is sharded over the ranks [0, 1], the group has [0]" in one["group"]
    assert other["group"] == "ValueError: rank 1 is not in the process group that it was given"
    assert "cannot be written" in one["export"] and "(rank 0)" in one["export"]
    assert os.listdir(Path(ranks[0]["folder"]) / "errors") != []


def moved(rank: int, groups: Any, folder: str, before: int) -> dict[str, Any]:
    """Goes on from the checkpoint of another number of ranks, and saves."""
    net, optimizer = sharded("delayed", rank, seed=1)
    dt.parallel.load(f"{folder}/{before}", net, optimizer)
    loaded = content(net, optimizer)
    train(net, optimizer, range(before, before + 2), rank=rank)
    dt.parallel.save(f"{folder}/{dist.get_world_size()}", net, optimizer, step=before + 2)
    return {"loaded": loaded, "saved": content(net, optimizer)}


@needs_gloo
def test_four_ranks_take_the_checkpoint_of_one_and_two_that_of_four(pool, tmp_path):
    net, optimizer = trained()
    dt.parallel.save(tmp_path / "1", net, optimizer, step=2)
    saved = content(net, optimizer)
    for before, ranks in ((1, 4), (4, 2)):
        made = pool.run(f"{__name__}:moved", str(tmp_path), before, size=ranks, into=tmp_path / "made")
        for of_rank in made:
            unlike = differing(of_rank["loaded"], saved)
            assert all("scale_states" in name for name in unlike) and (before > 1 or not unlike), unlike
        saved = made[0]["saved"]
