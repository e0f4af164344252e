"""Two GPUs of one host: FSDP2 around the compiled blocks of `llama`, forward and backward, and reductions of amaxes.

- "weak scaling": the tokens of `llama` on each GPU. A recipe's name alone: weights are sharded, and gathered in its
  format (`dt.parallel.prepare`). "one GPU": the same blocks and tokens without FSDP, on both GPUs at the same time.
- "gathers": so few tokens that gathering binds. "bf16 gather": the same recipe by FSDP2 without `prepare`.
- "tensor parallel": see `cut.py`.
- "reductions": of the amaxes of all weights, once in each forward, and of one float.

A rank has tokens of its own. Its outputs and gradients are compared with those of the other variant.
"""

from __future__ import annotations

import copy
import gc
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import diptych.torch as dt
from benchmarks import ranks, room
from benchmarks.cases import ALONE, PLAIN_GATHER, RANKS, Case
from benchmarks.results import Row, failed
from benchmarks.sections import cut
from benchmarks.sections.llama import BOUND, PlainBlock, fused, stack
from diptych.common import RECIPES
from diptych.torch.functional.amax_group import max_over

BACKEND = "inductor"  # of torch.compile; tests compile without it
BEHIND = "the hosts did not get ahead of the GPUs"
BOUNDS = {
    "of bf16": BOUND,
    "difference": 0.02,
    # An amax that differs in its last bit, as where attention's backward adds in another order, moves a scale and with
    # it all roundings to E5M2. Gradients that were not reduced, or not averaged, would differ by about 1.
    "gradients": 0.25,
}


def rows(case: Case, _: Any) -> Iterator[Row]:
    return ranks.measured(__name__, case, backend=BACKEND)


def on_rank(case: Case, rank: int, backend: str) -> Iterator[Row]:
    torch._dynamo.config.recompile_limit = 64  # one function, compiled for each variant
    if case.what == "tensor parallel":
        return cut.rows(case, rank, backend)
    return reductions(case) if case.what == "reductions" else steps(case, rank, backend)


def variants(case: Case) -> Iterator[tuple[str, str]]:
    """Yields (name, the name of what it is compared with, or nothing); that stands before it."""
    if case.what == "gathers":
        yield "bf16", ""
    for name in case.names:
        reference = f"{name} {ALONE if case.what == 'weak scaling' else PLAIN_GATHER}"
        yield reference, ""
        yield name, reference


def sharded(net: nn.Sequential, recipe: Any) -> nn.Sequential:
    """Applies FSDP2 to each block, and `prepare` if there is a recipe."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(room.DEVICE, (RANKS,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for block in net:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(net, mesh=mesh, mp_policy=policy)
    if recipe is not None:
        dt.parallel.prepare(net, mesh, recipe)
    return net


class Results(NamedTuple):
    """`added`: what the blocks add to x. `grads`: this rank's part of each gradient's mean over the ranks."""

    added: Tensor
    grads: list[Tensor]


class Variant:
    """A model and its step. `alone`: it is not sharded."""

    def __init__(self, case: Case, name: str, backend: str, x: Tensor, dy: Tensor) -> None:
        recipe_name, _, kind = name.partition(" ")
        self.recipe = copy.deepcopy(RECIPES[recipe_name]) if recipe_name in RECIPES else None
        self.alone = kind == ALONE
        net = stack(PlainBlock, case) if self.recipe is None else fused(case)
        for i, block in enumerate(net):
            net[i] = torch.compile(block, fullgraph=True, backend=backend)
        self.net = net if self.alone else sharded(net, None if kind == PLAIN_GATHER else self.recipe)
        self.x, self.dy = x.clone().requires_grad_(), dy

    def run(self) -> Tensor:
        with dt.autocast(enabled=self.recipe is not None, recipe=self.recipe):
            y = self.net(self.x)
        y.backward(self.dy)
        return y.detach()

    def step(self) -> Tensor:
        y = self.run()
        self.net.zero_grad()
        self.x.grad = None
        return y

    def results(self) -> Results:
        y = self.run()
        grads = [self.part(p.grad) for p in self.net.parameters()]
        self.net.zero_grad()
        self.x.grad = None
        return Results(y - self.x.detach(), grads)

    def part(self, grad: Any) -> Tensor:
        if not self.alone:
            return grad.to_local()
        total = grad.float()
        dist.all_reduce(total)
        return (total / RANKS).to(grad.dtype).chunk(RANKS)[dist.get_rank()].clone()


def gathered(step: Callable[[], Any]) -> int:
    """Returns the bytes that all-gathers make on this rank in a step."""
    names = [n for n in ("all_gather_into_tensor", "all_gather_single") if hasattr(dist, n)]  # by torch's version
    originals = {n: getattr(dist, n) for n in names}
    total = 0

    def counting(original: Callable[..., Any]) -> Callable[..., Any]:
        def gather(output_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            nonlocal total
            total += output_tensor.nbytes
            return original(output_tensor, *args, **kwargs)

        return gather

    try:
        for n, original in originals.items():
            setattr(dist, n, counting(original))
        step()
    finally:
        for n, original in originals.items():
            setattr(dist, n, original)
    if not total:
        raise RuntimeError("no all-gather was seen")
    return total


def measured(variant: Variant, before: int) -> Row:
    """Returns the memory of a step beyond `before`, and what it gathers."""
    more: Row = {}
    if room.DEVICE == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        variant.step()
        more["GiB"] = (torch.cuda.max_memory_allocated() - before) / 2**30
    if not variant.alone:
        more["gathered MiB"] = gathered(variant.step) / 2**20
    return more


def checked(made: Results, want: Results | None, plain: Tensor) -> Row:
    """Returns relative differences, the largest of all ranks: of what is added from bfloat16's, of it and of gradients
    from those of `want`. **Raises** RuntimeError on all ranks if they are too large, or a gradient is not finite."""
    row = {"of bf16": room.difference(made.added, plain)}
    if want is not None:
        row["difference"] = room.difference(made.added, want.added)
        row["gradients"] = max(map(room.difference, made.grads, want.grads))
    finite = all(bool(g.isfinite().all()) for g in made.grads)
    every = ranks.of_all([finite, row])
    row = {k: max((other[k] for _, other in every), key=lambda v: (v != v, v)) for k in row}  # NaN is the largest
    if not all(f for f, _ in every):
        raise RuntimeError("gradients are not finite")
    if not all(v <= BOUNDS[k] for k, v in row.items()):
        raise RuntimeError(f"differs by {row}, at most {BOUNDS}")
    return row


def steps(case: Case, rank: int, backend: str) -> Iterator[Row]:
    torch.manual_seed(rank)
    x = room.normal(*case.shape)
    dy = torch.randn_like(x)
    found: dict[str, Row] = {}
    calls: dict[str, Callable[[], Any]] = {}
    kept: dict[str, Results] = {}  # of the last reference
    plain = None
    for name, reference in variants(case):
        start, error = time.perf_counter(), ""
        try:
            if any(ranks.of_all(start > room.deadline)):  # together, or one rank would wait for the other
                raise TimeoutError("not measured: the section's time was over")
            if reference and reference not in kept:
                raise RuntimeError("what it is compared with failed")
            kept = kept if reference else {}
            gc.collect()
            before = torch.cuda.memory_allocated() if room.DEVICE == "cuda" else 0
            variant = Variant(case, name, backend, x, dy)
            for _ in range(2):
                variant.step()
            row = {"compile s": time.perf_counter() - start, **measured(variant, before)}
            results = variant.results()
            plain = results.added if plain is None else plain
            row |= checked(results, kept.get(reference), plain)
            if not reference:
                kept = {name: results}
            found[name], calls[name] = {"case": str(case), "name": name, **row}, variant.step
        except Exception as raised:
            traceback.print_exc()
            error = f"{type(raised).__name__}: {raised}"
        if errors := [e for e in ranks.of_all(error) if e]:
            found[name] = failed(case, name, errors[0])
            calls.pop(name, None)
        said(rank, f"{case}: {name}: {'; '.join(errors) or 'right'}, {time.perf_counter() - start:.1f} s")
    kept.clear()
    start = time.perf_counter()
    times = ranks.device_seconds(calls, 7)
    walls = ranks.wall_seconds(calls, 3, 4) if room.DEVICE == "cuda" else times
    said(rank, f"{case}: timed in {time.perf_counter() - start:.1f} s")
    tokens = case.shape[0] * case.shape[1]
    for name, row in found.items():
        if name in calls:
            row["wall us"] = walls[name] * 1e6
            if name in times:
                row |= {"us": times[name] * 1e6, "rate": tokens / times[name], "unit": "tokens/s"}  # of a GPU
            else:
                row["failed"] = BEHIND
        yield row


def said(rank: int, text: str) -> None:
    if rank == 0:
        print(text, flush=True)


def reductions(case: Case) -> Iterator[Row]:
    net: Any = sharded(fused(case), RECIPES["fp8-current"])
    group = dist.group.WORLD
    amaxes = net[0].qkv.weight._local_tensor.gather.amaxes
    weights = amaxes._weights
    many = torch.rand(len(weights), device=room.DEVICE)
    one = torch.rand(1, device=room.DEVICE)

    def whole() -> Tensor:
        amaxes.forget()
        return torch.cat(amaxes.of(list(range(len(weights))), group, torch.float32))

    right = torch.equal(whole(), torch.stack([w.full_tensor().detach().abs().max().float() for w in weights]))
    calls: dict[str, Callable[[], Any]] = {
        f"amaxes of {len(weights)} weights": whole,
        f"reduction of {len(weights)} floats": lambda: max_over(many, group),
        "all-reduce of one float": lambda: dist.all_reduce(one, dist.ReduceOp.MAX),
    }
    times = ranks.device_seconds(calls, 21)
    host = room.host_seconds(calls, ranks.wait, 1)
    for name in calls:
        if not right:
            yield failed(case, name, "the amaxes are not those of the whole weights")
        elif name not in times:
            yield failed(case, name, BEHIND)
        else:
            yield {"case": str(case), "name": name, "us": times[name] * 1e6, "host us": host[name] * 1e6}
