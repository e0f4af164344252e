"""prepare_weights and what happens between two steps: writes that no version counter shows, evaluations, swaps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import diptych.torch as dt
from diptych import core
from torch_frontend.modules.test_prepared_weights import (
    MUCH,
    RECIPES,
    STATELESS,
    calls,
    loaded,
    model,
    optimizer,
    same,
    train,
    used,
)


def written(m: nn.Module, value: float) -> None:
    """Writes that no version counter shows, as averages of weights and merged adapters are written."""
    for p in m.parameters():
        p.data.mul_(value)


EVALUATIONS = {
    "no_grad": lambda m: torch.no_grad(),
    "eval": lambda m: torch.enable_grad() if m.eval() is m else None,
    "eval, no_grad": lambda m: torch.no_grad() if m.eval() is m else None,
    "eval, inference_mode": lambda m: torch.inference_mode() if m.eval() is m else None,
    "dry run": lambda m: dt.dry_run(),
}


@pytest.mark.parametrize("how", EVALUATIONS)
def test_evaluations_see_writes_that_move_no_counter(device, how):
    def run(prepare: bool, name: str) -> list[torch.Tensor]:
        m = model(device)
        opt = optimizer(m)
        if prepare:
            dt.prepare_weights(m, opt, max_bytes=MUCH)
        seen, x = [], torch.ones(32, 64, dtype=torch.bfloat16, device=device)
        for _ in range(2):
            seen += train(m, opt, RECIPES[name], 1)
            written(m, 2)
            with EVALUATIONS[how](m), dt.autocast(recipe=RECIPES[name]):
                seen.append(m(x).detach().clone())
            m.train()
            written(m, 0.5)
        return seen

    for name in STATELESS:
        same(run(True, name), run(False, name))


def test_drop_throws_copies_away_until_the_next_step():
    m, x = model(), torch.ones(32, 64, dtype=torch.bfloat16)
    opt = optimizer(m)
    prepared = dt.prepare_weights(m, opt, max_bytes=MUCH)
    train(m, opt, RECIPES["mxfp8"], 1)
    held = prepared.nbytes
    written(m, 2)
    prepared.drop()
    assert used(m) == [False] * 5 and prepared.nbytes == 0 < held
    plain = copy.deepcopy(m)
    with dt.autocast(recipe=RECIPES["mxfp8"]):
        same([m(x).detach()], [plain(x).detach()])
    opt.step()
    assert used(m) == [True] * 5 and prepared.nbytes == held
    prepared.remove()
    prepared.drop()
    assert prepared.nbytes == 0


def test_layers_that_train_in_evaluation_mode_use_copies_made_in_it():
    m, x = model().eval(), torch.ones(32, 64, dtype=torch.bfloat16)
    opt = optimizer(m)
    dt.prepare_weights(m, opt, max_bytes=MUCH)
    counts = []
    for _ in range(2):
        core.reset_calls()
        with dt.autocast(recipe=RECIPES["current"]):
            y = m(x)
        counts.append(calls())
        y.float().sum().backward()
        opt.step()
    assert counts[0] - counts[1] == 5


def test_steps_in_inference_mode():
    def run(off: Any) -> list[torch.Tensor]:
        m = model()
        opt = torch.optim.SGD(m.parameters(), lr=0.1)
        dt.prepare_weights(m, opt, max_bytes=MUCH)
        x = torch.ones(32, 64, dtype=torch.bfloat16)
        for _ in range(2):
            with dt.autocast(recipe=RECIPES["block"]):
                m(x).float().sum().backward()
            with off():
                opt.step()
        assert used(m) == [True] * 5
        return [p.detach() for p in m.parameters()]

    same(run(torch.inference_mode), run(torch.no_grad))


def cast(m: nn.Module, step: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        m.to(dtype)


@pytest.mark.parametrize("change", [cast, loaded], ids=lambda f: f.__name__)
def test_swapped_parameters(device, change, monkeypatch):
    """torch.utils.swap_tensors refuses a tensor that has a weak reference."""
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    assert torch.__future__.get_swap_module_params_on_conversion()
    want = train(m := model(device), optimizer(m), RECIPES["current"], change=change)
    m = model(device)
    opt = optimizer(m)
    dt.prepare_weights(m, opt, max_bytes=MUCH)
    same(train(m, opt, RECIPES["current"], change=change), want)


BETWEEN = {
    "an evaluation by another recipe": lambda m, opt, prepared: other_recipe(m),
    "drop": lambda m, opt, prepared: prepared and prepared.drop(),
    "remove": lambda m, opt, prepared: prepared and prepared.remove(),
    "prepared anew": lambda m, opt, prepared: (
        prepared and (prepared.remove() or dt.prepare_weights(m, opt, max_bytes=MUCH))
    ),
}
CHECKPOINTS = {
    "plain": lambda m, x: checkpoint(m, x, use_reentrant=False),
    "reentrant": lambda m, x: checkpoint(m, x, use_reentrant=True),
    "nested": lambda m, x: checkpoint(lambda x: checkpoint(m, x, use_reentrant=False), x, use_reentrant=False),
    "layers": lambda m, x: checkpoint(
        lambda x: checkpoint(m[2:], checkpoint(m[:2], x, use_reentrant=True), use_reentrant=False),
        x,
        use_reentrant=False,
    ),
}


def other_recipe(m: nn.Module) -> None:
    m.eval()
    with dt.autocast(recipe=RECIPES["delayed"]):
        m(torch.ones(32, 64, dtype=torch.bfloat16, device=next(m.parameters()).device))
    m.train()


CHANGES = ("recipe stays", "recipe changes")
CELLS = [  # every pair of values meets in those that always run
    pytest.param(kind, between, change, marks=pytest.mark.slow if (i + j + k) % 2 else ())
    for i, kind in enumerate(CHECKPOINTS)
    for j, between in enumerate(BETWEEN)
    for k, change in enumerate(CHANGES)
]


@pytest.mark.parametrize(("kind", "between", "change"), CELLS)
def test_recomputations_use_what_their_forward_used(device, between, kind, change):
    names = ("mxfp8", "block") if change == "recipe changes" else ("mxfp8", "mxfp8")

    def run(prepare: bool) -> list[torch.Tensor]:
        m = model(device)
        opt = optimizer(m)
        prepared = dt.prepare_weights(m, opt, max_bytes=MUCH) if prepare else None
        train(m, opt, RECIPES[names[0]], 1)
        seen = []
        for name in names:
            opt.zero_grad()
            x = torch.ones(32, 64, dtype=torch.bfloat16, device=device).requires_grad_()
            with dt.autocast(recipe=RECIPES[name]):
                y = CHECKPOINTS[kind](m, x)
            prepared = BETWEEN[between](m, opt, prepared) or prepared
            y.float().square().sum().backward()
            seen += [y.detach().clone(), x.grad.clone(), *[p.grad.clone() for p in m.parameters()]]
        return seen

    same(run(True), run(False))
