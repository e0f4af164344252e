"""Modules that are cut over ranks: their parameters, their copies, their groups, and arguments that do not fit."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import diptych.torch as dt
from diptych.common import DelayedScaling
from torch_frontend.cut_layers import RECIPES, Fused, Plain, collectives, error_of
from torch_frontend.ranks import needs_gloo
from torch_frontend.tools import same

pytestmark = needs_gloo
F32 = ("float32", "float32")
CASES: dict[str, Fused] = {
    "column": Plain("column", "current", True, F32),
    "row": Plain("row", "current", True, F32),
    "linear": Fused("linear", "current", True, F32),
    "mlp": Fused("mlp gelu", "current", True, F32),
    "gated mlp": Fused("mlp swiglu", "delayed", True, F32),
}

# --- parameters ---


def uniform(t: torch.Tensor) -> None:
    nn.init.uniform_(t, 1, 2)


METHODS = {"": {}, "init_method": {"init_method": uniform}}


def drawn(rank: int, groups: Any, name: str, method: str) -> dict[str, Any]:
    """Parameters and the next random number, each way to come to a module."""
    case, given = CASES[name], dict(METHODS[method])
    if given and "mlp" in name:
        given["output_layer_init_method"] = nn.init.normal_
    made = {}
    with collectives() as seen:
        torch.manual_seed(3)
        module = _cut(case, groups["data"], **given)
        made["made"] = dict(module.state_dict()) | {"random": torch.rand(3)}
        late = _cut(case, None, tp_size=2, device="meta", **given)
        late.set_tensor_parallel_group(groups["data"])
        late.to_empty(device="cpu")
        torch.manual_seed(3)
        late.reset_parameters()
        made["late"] = dict(late.state_dict()) | {"random": torch.rand(3)}
        torch.manual_seed(3)
        module.reset_parameters()
        made["again"] = dict(module.state_dict()) | {"random": torch.rand(3)}
    assert not seen
    names = ("tensor_model_parallel", "partition_dim", "partition_stride")
    made["marks"] = {n: [getattr(p, m, None) for m in names] for n, p in module.named_parameters()}
    return made


def _cut(case: Fused, group: Any, **given: Any) -> Any:
    if "mlp" in case.module:
        how = {"set_parallel_mode": True}
    else:
        how = {"parallel_mode": case.module if isinstance(case, Plain) else "column"}
    return case.make(tp_group=group, sequence_parallel=case.sequence, **how, **given)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", CASES)
def test_parameters_are_parts_of_the_whole_modules(name, method, pool, tmp_path):
    case, given = CASES[name], dict(METHODS[method])
    if given and "mlp" in name:
        given["output_layer_init_method"] = nn.init.normal_
    torch.manual_seed(3)
    whole = case.make(**given)
    random = torch.rand(3)
    for rank, made in enumerate(pool.run(f"{__name__}:drawn", name, method, into=tmp_path / "made")):
        for way in ("made", "late", "again"):
            same(made[way].pop("random"), random, way)
            assert made[way].keys() == whole.state_dict().keys()
            for key, p in whole.named_parameters():
                same(made[way][key], case.part(key, p.detach(), rank), f"{way} {key}")


@pytest.mark.parametrize("name", CASES)
def test_marks_are_megatrons(name, pool, tmp_path):
    """Which parameters are cut, along which dimension, and how many stacked weights each is."""
    cut = {"weight": 0, "bias": 0, "fc1_weight": 0, "fc1_bias": 0, "fc2_weight": 1} | (
        {"weight": 1} if name == "row" else {}
    )
    stacked = 2 if name == "gated mlp" else 1
    for made in pool.run(f"{__name__}:drawn", name, "", into=tmp_path / "made"):
        for key, (parallel, dim, stride) in made["marks"].items():
            if key in cut and not (name == "row" and key == "bias"):
                assert (parallel, dim) == (True, cut[key]) and stride == (stacked if "fc1" in key else 1), key
            else:
                assert not parallel and dim in (None, -1), key


# --- copies and groups ---


def copied(rank: int, groups: Any, name: str) -> dict[str, list[Any]]:
    """A step of a module, of its copies, and of one that was loaded and given its group again."""
    case, group = CASES[name], groups["data"]
    module = case.cut(group)
    made = {"deepcopy": copy.deepcopy(module)}
    made["pickle"] = pickle.loads(pickle.dumps(module))
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    made["torch.save"] = torch.load(file, weights_only=False)
    assert made["deepcopy"].tp_group is group and made["pickle"].tp_group is None
    for way in ("pickle", "torch.save"):
        x = case.part("x", case.data(0)[0], rank)
        classes, text, seen = error_of(lambda: made[way](x), RECIPES[case.recipe])  # noqa: B023
        assert "TypeError" in classes and "no group" in text and not seen, (classes, text, seen)
        made[way].set_tensor_parallel_group(group)
    want = [case.run(module, i, rank) for i in range(2)]
    made |= {"copied after steps": copy.deepcopy(module)}
    later = case.run(module, 2, rank)
    for way, each in made.items():
        assert (each.tp_size, each.sequence_parallel) == (2, True)
        assert repr(each) == repr(module) and "parallel over 2" in repr(each)
        got = [case.run(each, 2, rank)] if way == "copied after steps" else [case.run(each, i, rank) for i in range(2)]
        for a, b in zip(got, [later] if way == "copied after steps" else want, strict=True):
            for key in b:
                same(a[key], b[key], f"{way} {key}")
    return {"ways": list(made)}


@pytest.mark.parametrize("name", CASES)
def test_copies(name, pool, tmp_path):
    assert len(pool.run(f"{__name__}:copied", name, into=tmp_path / "made")) == 2


def pairs(rank: int, groups: Any, recipe: str) -> list[Any]:
    """Two groups of two ranks, whose data differ: their results, and scales of all four where amaxes are reduced so."""
    both: list[Any] = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    case = Plain("row", recipe, True, F32)
    made = []
    for region in ({}, {"amax_reduction_group": groups["data"]}):
        module = case.cut(both[rank // 2])
        for i in range(2):
            case.fill(module, i, rank % 2)
            module.zero_grad()
            x, dy = (
                case.part(n, t, rank % 2) * (1 + rank // 2 * 30) for n, t in zip(("x", "dy"), case.data(i), strict=True)
            )
            x = x.contiguous().requires_grad_()
            with dt.autocast(recipe=RECIPES[recipe], **region):
                y = module(x)
            y.backward(dy)
        made.append({"y": y.detach(), "dx": x.grad, "dw": module.weight.grad}
                    | {k: v.clone() for k, v in module.state_dict().items() if k.endswith("scale")})  # fmt: skip
        if recipe != "delayed":
            break
    for group in both:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    return made


def two(rank: int, groups: Any, recipe: str, times: int) -> dict[str, torch.Tensor]:
    case = Plain("row", recipe, True, F32)
    module = case.cut(groups["data"])
    for i in range(2):
        case.fill(module, i, rank)
        module.zero_grad()
        x, dy = (case.part(n, t, rank) * times for n, t in zip(("x", "dy"), case.data(i), strict=True))
        x = x.contiguous().requires_grad_()
        with dt.autocast(recipe=RECIPES[recipe]):
            y = module(x)
        y.backward(dy)
    return {"y": y.detach(), "dx": x.grad, "dw": module.weight.grad}


@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_two_groups_of_two_ranks(recipe, pool, tmp_path):
    made = pool.run(f"{__name__}:pairs", recipe, size=4, into=tmp_path / "made")
    for pair, times in enumerate((1, 31)):
        alone = pool.run(f"{__name__}:two", recipe, times, into=tmp_path / f"two{times}")
        for rank in range(2):
            for key, want in alone[rank].items():
                same(made[2 * pair + rank][0][key], want, f"group {pair}, rank {rank}: {key}")
    if recipe == "delayed":
        joint = [m[1] for m in made]
        scales = [k for k in joint[0] if k.endswith("scale")]
        assert len(scales) == 3
        for key in scales:
            for m in joint:
                same(m[key], joint[2][key], key)
        assert any(not torch.equal(made[0][0][k], joint[0][k]) for k in scales)


def one_rank(rank: int, groups: Any) -> bool:
    """A group of one rank cuts nothing."""
    alone = dist.new_group([rank], use_local_synchronization=True)
    module = dt.Linear(7, 5, parallel_mode="row", tp_group=alone, sequence_parallel=True)
    whole = dt.Linear(7, 5, parallel_mode="row", tp_size=1)
    whole.load_state_dict(module.state_dict())
    with collectives() as seen, dt.autocast():
        same(module(torch.ones(3, 7)), whole(torch.ones(3, 7)))
    assert not seen and module.tp_size == 1 and "parallel" not in repr(module)
    return True


def test_one_rank(pool, tmp_path):
    assert pool.run(f"{__name__}:one_rank", into=tmp_path / "made") == [True, True]


# --- arguments that do not fit ---


def _late(group: Any, size: int = 2) -> Any:
    module = dt.Linear(64, 64, tp_size=size, parallel_mode="column", device="meta").to_empty(device="cpu")
    if group is not None:
        module.set_tensor_parallel_group(group)
    return module


def _held(group: Any) -> Any:
    with dt.quantized_model_init(recipe=RECIPES["mxfp8"]):
        return dt.Linear(64, 64, parallel_mode="column", tp_group=group)


def _alone(group: Any) -> Any:
    return dist.new_group([dist.get_rank()], use_local_synchronization=True)


X = torch.ones(32, 64)
ARGUMENTS: dict[str, tuple[Any, str, str]] = {
    "in_features": (lambda g: dt.Linear(65, 64, parallel_mode="row", tp_group=g), "ValueError", "in_features=65"),
    "out_features": (lambda g: dt.Linear(64, 65, parallel_mode="column", tp_group=g), "ValueError", "out_features=65"),
    "of a norm's": (
        lambda g: dt.LayerNormLinear(64, 65, parallel_mode="column", tp_group=g), "ValueError", "out_features=65",
    ),
    "ffn": (lambda g: dt.LayerNormMLP(64, 65, set_parallel_mode=True, tp_group=g), "ValueError", "ffn_hidden_size=65"),
    "another size": (lambda g: dt.Linear(64, 64, parallel_mode="row", tp_group=g, tp_size=4), "ValueError", "2 ranks"),
    "a size of 0": (lambda g: dt.Linear(64, 64, parallel_mode="row", tp_size=0), "TypeError", "positive int"),
    "True ranks": (lambda g: dt.Linear(64, 64, parallel_mode="row", tp_size=True), "TypeError", "positive int"),
    "a word": (lambda g: dt.Linear(64, 64, parallel_mode="row", tp_size="2"), "TypeError", "positive int"),
    "no mode": (lambda g: dt.Linear(64, 64, tp_group=g), "TypeError", "parallel_mode"),
    "no mode by size": (lambda g: dt.LayerNormLinear(64, 64, tp_size=2), "TypeError", "parallel_mode"),
    "no mode of an mlp": (lambda g: dt.LayerNormMLP(64, 64, tp_group=g), "TypeError", "set_parallel_mode"),
    "a wrong mode": (lambda g: dt.Linear(64, 64, parallel_mode="rows", tp_group=g), "ValueError", "'rows'"),
    "a wrong mode of one rank": (lambda g: dt.Linear(64, 64, parallel_mode="rows"), "ValueError", "'rows'"),
    "a norm by row": (
        lambda g: dt.LayerNormLinear(64, 64, parallel_mode="row", tp_group=g), "NotImplementedError", "the norm reads",
    ),
    "sequence by number": (
        lambda g: dt.Linear(64, 64, parallel_mode="row", tp_group=g, sequence_parallel=1), "TypeError", "a bool",
    ),
    "quantized_model_init": (_held, "NotImplementedError", "quantized_model_init"),
    "values without a rank": (lambda g: dt.Linear(64, 64, tp_size=2, parallel_mode="row"), "TypeError", "tp_group"),
    "no group at forward": (lambda g: _late(None)(X), "TypeError", "there is no group"),
    "a group of another size": (lambda g: _late(g, 4), "ValueError", "2 ranks, and tp_size is 4"),
    "a group of one": (lambda g: _late(_alone(g)), "ValueError", "1 ranks, and tp_size is 2"),
    "no group given": (lambda g: _late(g).set_tensor_parallel_group(None), "ValueError", "tp_size is 2"),
    "a whole module": (lambda g: dt.Linear(64, 64).set_tensor_parallel_group(g), "NotImplementedError", "is whole"),
    "experts": (lambda g: dt.GroupedLinear(2, 64, 64, tp_group=g), "NotImplementedError", "tp_group"),
}  # fmt: skip


def refused(rank: int, groups: Any, what: str) -> tuple[str, str, list[Any]]:
    return error_of(lambda: ARGUMENTS[what][0](groups["data"]), RECIPES["mxfp8"])


@pytest.mark.parametrize("what", ARGUMENTS)
def test_arguments(what, pool, tmp_path):
    _, error, says = ARGUMENTS[what]
    for classes, text, seen in pool.run(f"{__name__}:refused", what, into=tmp_path / "made"):
        assert error in classes.split() and says in text and not seen, (classes, text, seen)


def without_a_group(rank: int, groups: Any, name: str) -> tuple[str, str, list[Any]]:
    """A module whose group was never named, in a region, outside, and under delayed scaling."""
    case = CASES[name]
    module = _cut(case, None, tp_size=2, device="meta").to_empty(device="cpu")
    x = case.part("x", case.data(0)[0], rank)
    for recipe in (None, RECIPES["current"], DelayedScaling()):
        classes, text, seen = error_of(lambda: module(x), recipe)
        assert "TypeError" in classes and "there is no group" in text and not seen, (recipe, classes, text, seen)
    return classes, text, seen


@pytest.mark.parametrize("name", CASES)
def test_no_module_runs_without_its_group(name, pool, tmp_path):
    assert len(pool.run(f"{__name__}:without_a_group", name, into=tmp_path / "made")) == 2
