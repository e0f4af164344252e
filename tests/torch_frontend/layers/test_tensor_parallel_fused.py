"""LayerNormLinear and LayerNormMLP cut over ranks have one process's bits where nothing is summed over ranks, and those
of the oracle's sums elsewhere: fc2's output, and the gradient of the norm's output with what follows from it."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

import diptych.torch as dt
import oracle
from diptych.common import QuantizerRole
from diptych.common.layers.schedule import OFFSETS
from diptych.torch.functional import activation as activation_verbs
from diptych.torch.functional import norm as norm_verbs
from oracle import parallel
from quantizers import oracle_options
from torch_frontend.cut_layers import DRAWN, EVERY, MODULES, NUMBERS, RECIPES, SEED, Fused, dtypes_of
from torch_frontend.ranks import needs_gloo
from torch_frontend.tools import same, to_numpy, to_torch

pytestmark = needs_gloo


class Expected:
    """Each rank's results from a whole module and the oracle's sums."""

    def __init__(self, case: Fused) -> None:
        self.case, self.whole, self.mlp = case, case.make(), "mlp" in case.module
        self.number = 0
        if case.recipe in DRAWN:
            self.whole.seed_rng(SEED)
        f, k = case.of.nk
        options = {o: v for o, v in MODULES[case.module].items() if o != "activation"}
        dtype = getattr(torch, case.dtypes[1])
        self.first = dt.LayerNormLinear(k, f * (1 + case.gated), dtype=dtype, **options)  # fc1's output

    def quantized(self, tensor: str, value: torch.Tensor, layer: str = "", **usage: bool) -> oracle.Quantized:
        q: Any = EVERY[self.case.recipe].quantizer(QuantizerRole(tensor=tensor)).with_usage(**usage)
        given = {}
        if q.needs_scale:
            given["scale"] = to_numpy(self.whole.state_dict()[f"scale_states.{layer}{tensor}.scale"])
        if q.needs_rng:  # each layer of a module takes its offsets in turn
            layers, of_layer = 1 + self.mlp, OFFSETS * (layer == "fc2.")
            offset = OFFSETS * layers * self.number + of_layer + 2 * NUMBERS[tensor]
            given["rng"] = oracle.rng_words(SEED, offset)
        return oracle.quantize(to_numpy(value), q.format.name, **oracle_options(q), **given)

    def by_rank(self, t: torch.Tensor, dim: int) -> torch.Tensor:
        """Stacked halves in the order of ranks: each rank's gate, then its value."""
        halves = [half.chunk(self.case.size, dim) for half in t.chunk(1 + self.case.gated, dim)]
        return torch.cat([part for parts in zip(*halves, strict=True) for part in parts], dim)

    def step(self, number: int) -> list[dict[str, torch.Tensor]]:
        case, whole, size = self.case, self.whole, self.case.size
        self.number = number
        made = case.run(whole, number)
        if case.gated and case.recipe in DRAWN:  # random bits are counted in the order of ranks: gate, value, gate, ...
            del made["fc1_weight"]
        x, dy = case.data(number)
        dtype = to_numpy(x).dtype
        if self.mlp:
            made["y"], dz = self.of_mlp(x, dy, number)
        else:
            dz = self.partial_dgrad(dy, whole.weight.detach(), "", dtype)
        z_grad = to_torch(dz).view(x.shape)
        split = [case.part("x", t, r) for t in (x, z_grad) for r in range(size)]
        ranks = [self.of_norm(a, b) for a, b in zip(split[:size], split[size:], strict=True)]
        out = []
        for rank in range(size):
            parts = {k: case.part(k, v, rank) for k, v in made.items()} | ranks[rank]
            if case.sequence:
                biases = [case.part("dy", dy, r) for r in range(size)] if self.mlp else []
                if biases:
                    sums = [oracle.bias_grad(to_numpy(b), to_numpy(whole.fc2_bias).dtype) for b in biases]
                    parts["fc2_bias"] = to_torch(parallel.sum_partials(sums))
                for name in [n for n in parts if n.startswith("layer_norm")]:
                    parts[name] = to_torch(parallel.sum_partials([to_numpy(r[name]) for r in ranks]))
            out.append(parts)
        return out

    def of_norm(self, x: torch.Tensor, dz: torch.Tensor) -> dict[str, torch.Tensor]:
        names = ("x", "layer_norm_weight", "layer_norm_bias")
        given = [x, self.whole.layer_norm_weight, self.whole.layer_norm_bias]
        leaves = [None if t is None else t.detach().clone().requires_grad_() for t in given]
        norm_verbs.layernorm(*leaves, self.whole.norm).backward(dz)
        grads = {n: t.grad for n, t in zip(names, leaves, strict=True) if t is not None}
        return {"dx": grads.pop("x")} | grads

    def partial_dgrad(self, dy: torch.Tensor, w: torch.Tensor, layer: str, dtype: Any) -> np.ndarray:
        qdy = self.quantized("grad_output", dy, layer, columnwise=False)
        qw = self.quantized("weight", w, layer)
        cuts = zip(
            parallel.cut(qdy.copy(), self.case.size, 1),
            parallel.cut(qw.copy(columnwise=True), self.case.size),
            strict=True,
        )
        return parallel.sum_partials([oracle.gemm_cpu(a, b, out_dtype=dtype) for a, b in cuts])

    def of_mlp(self, x: torch.Tensor, dy: torch.Tensor, number: int) -> tuple[torch.Tensor, np.ndarray]:
        """y, and the gradient of the norm's output."""
        whole, act, dtype = self.whole, self.whole.activation_options, to_numpy(x).dtype
        with torch.no_grad():
            for name, p in self.first.named_parameters():
                p.copy_(getattr(whole, name if name.startswith("layer_norm") else f"fc1_{name}"))
        with dt.autocast(recipe=EVERY[self.case.recipe]):
            h = self.first(x).detach()
        wide = h.flatten(0, -2).float().requires_grad_()
        a = activation_verbs.activate(wide, act)  # unrounded, as the module quantizes it
        qa = self.quantized("input", a.detach(), "fc2.", columnwise=False)
        qw = self.quantized("weight", whole.fc2_weight.detach(), "fc2.")
        y = parallel.row_forward(qa.copy(), qw.copy(), self.case.size, to_numpy(whole.fc2_bias), dtype)
        qdy = self.quantized("grad_output", dy, "fc2.", columnwise=False)
        da = oracle.gemm_cpu(qdy.copy(), qw.copy(columnwise=True), out_dtype=dtype)
        a.backward(to_torch(da).float())
        dh, w1 = self.by_rank(wide.grad, 1), self.by_rank(whole.fc1_weight.detach(), 0)
        return to_torch(y).view(dy.shape), self.partial_dgrad(dh, w1, "fc1.", dtype)


def _cells() -> list[Any]:
    """Each recipe with modules, dtypes and sequence parallelism in turn; a long sweep runs the others."""
    cells = []
    for (row, recipe), (column, module) in itertools.product(enumerate(RECIPES), enumerate(MODULES)):
        for sequence, (turn, dtypes) in itertools.product((False, True), enumerate(dtypes_of(recipe))):
            case = Fused(module, recipe, sequence, dtypes)
            runs = (row + column) % 2 == 0 and sequence == ((row + column) % 4 > 0)
            runs = runs and turn == (row // 2 + column) % len(dtypes_of(recipe))
            cells.append(pytest.param(case, id=str(case), marks=() if runs else pytest.mark.slow))
    cells += [
        pytest.param(case, id=str(case), marks=pytest.mark.slow)
        for module, recipe in itertools.product(MODULES, RECIPES)
        for case in (Fused(module, recipe, True, dtypes_of(recipe)[0], size=4),)
    ]
    cells += [
        pytest.param(case, id=str(case), marks=() if module == "mlp gelu" else pytest.mark.slow)
        for module, sequence in itertools.product(MODULES, (False, True))
        for case in (Fused(module, "nvfp4 drawn", sequence, ("bfloat16", "bfloat16")),)
    ]
    return cells


@pytest.mark.parametrize("case", _cells())
def test_one_process_and_the_oracles_sums(case, pool, tmp_path):
    ranks = pool.run("torch_frontend.cut_layers:module_steps", case, size=case.size, into=tmp_path / "made")
    reference = Expected(case)
    for i in range(case.steps):
        for rank, want in enumerate(reference.step(i)):
            got = ranks[rank][i]
            assert got.keys() == want.keys() | ({"fc1_weight"} if case.gated and case.recipe in DRAWN else set())
            for name in want:
                same(got[name], want[name], f"{case}, step {i}, rank {rank}: {name}")
