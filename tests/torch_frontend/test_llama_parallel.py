"""examples/torch_llama.py with --tp: cut models against whole ones, and runs against those of one process."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from llama_logs import TINY, near, rows
from torch_frontend.llama_runs import call, here, tensors
from torch_frontend.ranks import needs_gloo

from llama import torch_parallel as parallel, weights  # isort: skip  # llama_runs makes it found
from llama.config import Config  # isort: skip
from llama.torch_model import Llama, fill  # isort: skip

pytestmark = needs_gloo
RUN = "torch_frontend.llama_runs:on_rank"
WAYS = {
    "sequence": {},
    "tensor": {"sequence": False},
    "recomputed": {"recompute": True},
    "tied": {"tie_word_embeddings": True},
}


def step(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    return loss.detach()


def gradients(rank: int, groups: Any, way: str) -> dict[str, Any]:
    """The loss and the gradients of a cut model and of a whole one, in float32; and the cut model's way back."""
    given = dict(WAYS[way])
    config = Config.of(TINY | {"tie_word_embeddings": given.pop("tie_word_embeddings", False)})
    whole = Llama(config)
    cut_model = Llama(config, group=groups["data"], **given)
    drawn = weights.drawn(config, 3)
    cuts = parallel.cuts(cut_model)
    fill(whole, drawn, {})
    fill(cut_model, drawn, cuts)
    tokens = torch.randint(256, (3, 25), generator=torch.Generator().manual_seed(5))
    want, got = step(whole, tokens), step(cut_model, tokens)
    made: dict[str, Any] = {"loss": (want, got), "cut": set(cuts)}
    for (name, p), q in zip(cut_model.named_parameters(), whole.parameters(), strict=True):
        joined = cuts[name].whole(p.detach(), groups["data"]) if name in cuts else p.detach()
        assert torch.equal(joined, q), name
        grad = q.grad if name not in cuts else cuts[name].part(q.grad, groups["data"])  # type: ignore[arg-type]
        made[name] = (grad, p.grad)
    return made


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_those_of_the_whole_model(way, pool, tmp_path):
    ranks = pool.run(f"{__name__}:gradients", way, into=tmp_path / "made")
    for made in ranks:
        cut = made.pop("cut")
        assert len(cut) == 2 * 4 and all(n.endswith("weight") and "norm" not in n for n in cut)
        for name, (want, got) in made.items():
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 * float(want.abs().max()), msg=name)
    for name in ranks[0].keys() - cut:  # whole parameters stay the same on all ranks
        assert torch.equal(ranks[0][name][1], ranks[1][name][1]), name


@pytest.fixture
def common(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return ("--config", tmp_path / "config.json", "--batch", 4, "--seq", 64, "--save-every", 2, "--lr", 4e-3)


def test_two_ranks_share_each_layer(common, pool, tmp_path):
    """Losses and norms of one process, with a sequence that is shared and with one that is not; and the weights."""
    args = (*common, "--recipe", "bf16", "--steps", 4, "--clip", 0.5)
    assert not here(*args, "--metrics", tmp_path / "one", "--out", tmp_path / "whole")
    for way in ((), ("--no-sequence-parallel",)):
        two = (*args, *way, "--tp", 2, "--metrics", tmp_path / "two", "--out", tmp_path / "cut", "--peak-tflops", 0.01)
        assert pool.run(RUN, *two, into=tmp_path / "made") == ["", ""]
        near(tmp_path / "two", tmp_path / "one", 2e-3)
        for row in rows(tmp_path / "two"):
            want = row["tokens_per_s"] * Config.of(TINY).flops_per_token(64) / (2 * 0.01e12)
            assert row["mfu"] == pytest.approx(want)
        one, two = tensors(tmp_path / "whole"), tensors(tmp_path / "cut")
        assert one.keys() == two.keys()
        for name in one:
            torch.testing.assert_close(two[name], one[name], rtol=0, atol=0.01, msg=name)


def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(common, pool, tmp_path):
    """And one process goes on where two ranks with --tp 2 have stopped."""
    args = (*common, "--recipe", "fp8-delayed", "--save", tmp_path / "saved")
    two = (*args, "--tp", 2)
    assert pool.run(RUN, *two, "--steps", 4, "--metrics", tmp_path / "all", into=tmp_path / "made") == ["", ""]
    whole = rows(tmp_path / "all")
    assert whole[-1]["loss"] < whole[0]["loss"] - 0.1
    resume = ("--steps", 4, "--resume")
    for ranks, bound in ((2, 0.0), (1, 0.01)):
        (tmp_path / "saved/latest").write_text("step-000002")
        if ranks == 2:
            said = pool.run(RUN, *two, *resume, "--metrics", tmp_path / "again", into=tmp_path / "made")
            assert said == ["", ""]
        else:
            assert not here(*args, *resume, "--metrics", tmp_path / "one")
        got = rows(tmp_path / ("again" if ranks == 2 else "one"))
        assert [row["step"] for row in got] == [2, 3]
        for row, want in zip(got, whole[2:], strict=True):
            assert all(abs(row[k] - want[k]) <= bound * want[k] for k in ("loss", "grad_norm")), (ranks, row, want)


# What both ranks say, and the arguments.
WRONG: dict[str, tuple[Any, ...]] = {
    "no complete checkpoint": ("--save", "{folder}", "--resume"),
    "File exists: '{folder}/config.json'": ("--metrics", "{folder}/config.json/log"),
    "a block is never cut": ("--recipe", "mxfp8", "--seq", 10, "--batch", 1),
}


@pytest.mark.parametrize("said", WRONG)
def test_all_ranks_refuse_alike(said, common, pool, tmp_path):
    args = [str(a).format(folder=tmp_path) for a in WRONG[said]]
    one, two = pool.run(RUN, *common, "--tp", 2, *args, "--steps", 1, into=tmp_path / "made")
    assert said.format(folder=tmp_path) in one and one == two and "\n" not in one


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["bf16", "fp8-delayed", "fp8-block", "mxfp8", "nvfp4"])
def test_four_ranks_by_two_and_two(recipe, pool, tmp_path):
    """Losses of one process; a resumed run has the same bits."""
    args = ("--recipe", recipe, "--steps", 4, "--save-every", 2, "--accumulate", 2)
    assert not here(*args, "--metrics", tmp_path / "one")
    four = (*args, "--tp", 2, "--save", tmp_path / "saved")
    assert pool.run(RUN, *four, "--metrics", tmp_path / "four", size=4, into=tmp_path / "made") == [""] * 4
    near(tmp_path / "four", tmp_path / "one", 5e-3 if recipe == "bf16" else 3e-2)
    (tmp_path / "saved/latest").write_text("step-000002")
    resume = (*four, "--resume", "--metrics", tmp_path / "again")
    assert pool.run(RUN, *resume, size=4, into=tmp_path / "made") == [""] * 4
    for row, want in zip(rows(tmp_path / "again"), rows(tmp_path / "four")[2:], strict=True):
        assert all(row[k] == want[k] for k in ("step", "loss", "grad_norm"))


@pytest.mark.slow
def test_torchrun_ends_when_ranks_refuse(tmp_path):
    for ranks, args, said in (
        (2, ("--tp", 3), "--tp 3 does not divide the 2 ranks"),
        (2, ("--tp", 2, "--save", tmp_path, "--resume"), "no complete checkpoint"),
    ):
        ended = call(*args, ranks=ranks)
        assert ended.returncode and ended.stderr.count(f"{said}") == ranks, ended.stderr[-2000:]
