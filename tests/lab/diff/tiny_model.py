"""A small transformer in PyTorch that records its sites, in any precision, with faults to find.

Its parameters are float32 numbers in every precision, so that all runs compute the same function.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from diptych.lab.traces import Entry, Site

WIDTH, HEADS, BLOCKS, BATCH, LENGTH = 32, 4, 2, 4, 16
FAULTS = {
    "epsilon": "h.1.ln",
    "scale": "h.0.attn",
    "gelu": "h.1.act",
    "mask": "h.1.attn",
    "bias": "h.0.fc",
    "heads": "h.0.attn",
    "reduction": "loss",
    "transposed": "h.1.v",
}
"""The faults that a model can have, each with the first site that differs."""


def parameters(seed: int = 0) -> dict[str, torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)

    def drawn(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, generator=gen) * scale

    found = {"x": drawn(BATCH, LENGTH, WIDTH)}
    for i in range(BLOCKS):
        for name, n, k in (("q", 1, 1), ("k", 1, 1), ("v", 1, 1), ("o", 1, 1), ("fc", 4, 1), ("proj", 1, 4)):
            found[f"h.{i}.{name}.weight"] = drawn(n * WIDTH, k * WIDTH, scale=1 / math.sqrt(k * WIDTH))
            found[f"h.{i}.{name}.bias"] = drawn(n * WIDTH, scale=0.1)
        found[f"h.{i}.ln.weight"] = 1 + drawn(WIDTH, scale=0.1)
        found[f"h.{i}.ln.bias"] = drawn(WIDTH, scale=0.1)
    return found


def moved(given: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """Every element one ulp up or down."""
    gen = torch.Generator().manual_seed(seed)
    return {
        name: torch.nextafter(t, torch.where(torch.rand(t.shape, generator=gen) < 0.5, -math.inf, math.inf))
        for name, t in given.items()
    }


def run(given: dict[str, torch.Tensor], dtype: torch.dtype, fault: str = "", chunks: int = 1) -> list[Entry]:
    """Returns the sites of a step. `chunks`: products are sums of as many parts, so that they round differently."""
    p = {name: t.to(dtype, copy=True).requires_grad_() for name, t in given.items()}
    seen: list[tuple[str, torch.Tensor, tuple[str, ...]]] = []

    def site(name: str, value: torch.Tensor, *inputs: str) -> torch.Tensor:
        value.retain_grad()
        seen.append((name, value, tuple(f"activation:{i}" for i in inputs)))
        return value

    def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        parts = zip(x.chunk(chunks, -1), w.chunk(chunks, 1), strict=True)
        return sum((a @ b.T for a, b in parts), start=torch.zeros((), dtype=dtype))

    def linear(name: str, x: torch.Tensor, source: str) -> torch.Tensor:
        w, bias = p[f"{name}.weight"], p[f"{name}.bias"]
        w = w.T if fault == "transposed" and name == "h.1.v" else w
        y = product(x, w)
        return site(name, y if fault == "bias" and name == "h.0.fc" else y + bias, source)

    def split(x: torch.Tensor, wrong: bool) -> torch.Tensor:
        if wrong:
            return x.view(BATCH, LENGTH, WIDTH // HEADS, HEADS).permute(0, 3, 1, 2)
        return x.view(BATCH, LENGTH, HEADS, WIDTH // HEADS).transpose(1, 2)

    x, before = site("embed", p["x"] * 1.0), "embed"
    for i in range(BLOCKS):
        at = f"h.{i}"
        eps = 1e-3 if fault == "epsilon" and i == 1 else 1e-5
        centred = x - x.mean(-1, keepdim=True)
        y = centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + eps) * p[f"{at}.ln.weight"]
        y = site(f"{at}.ln", y + p[f"{at}.ln.bias"], before)
        q, k, v = (split(linear(f"{at}.{n}", y, f"{at}.ln"), fault == "heads" and i == 0 and n == "q") for n in "qkv")
        scores = q @ k.transpose(-1, -2)
        scores = scores if fault == "scale" and i == 0 else scores / math.sqrt(WIDTH // HEADS)
        after = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(2 if fault == "mask" and i == 1 else 1)
        mixed = torch.softmax(scores.masked_fill(after, -math.inf), -1) @ v
        mixed = mixed.transpose(1, 2).reshape(BATCH, LENGTH, WIDTH)
        mixed = site(f"{at}.attn", mixed, *(f"{at}.{n}" for n in "qkv"))
        x = site(f"{at}.mid", x + linear(f"{at}.o", mixed, f"{at}.attn"), before, f"{at}.o")
        y = linear(f"{at}.fc", x, f"{at}.mid")
        form = "tanh" if fault == "gelu" and i == 1 else "none"
        y = site(f"{at}.act", torch.nn.functional.gelu(y, approximate=form), f"{at}.fc")
        x, before = site(at, x + linear(f"{at}.proj", y, f"{at}.act"), f"{at}.mid", f"{at}.proj"), at
    loss = x.square().sum() if fault == "reduction" else x.square().mean()
    site("loss", loss, before)
    loss.backward()

    def entry(name: str, kind: str, value: torch.Tensor | None, inputs: tuple[str, ...]) -> Entry:
        assert value is not None
        value = value.detach().contiguous()
        array = value.view(torch.int16).numpy().view(np.uint16) if dtype == torch.bfloat16 else value.numpy()
        place = Site(name, kind, 0, tuple(value.shape), str(dtype)[6:], inputs)  # type: ignore[arg-type]
        return Entry(place, None, None, array)

    found = [entry(name, "parameter", p[name], ()) for name in p if name != "x"]
    found += [entry(name, "activation", value, inputs) for name, value, inputs in seen]
    users: dict[str, list[str]] = {}
    for name, value, inputs in reversed(seen):
        grads = tuple(f"activation_grad:{n}" for n in users.get(name, ()))
        found.append(entry(name, "activation_grad", value.grad, (*grads, f"activation:{name}")))
        for source in inputs:
            users.setdefault(source.partition(":")[2], []).append(name)
    for name in p:
        if name != "x" and p[name].grad is not None:
            found.append(entry(name, "parameter_grad", p[name].grad, (f"activation_grad:{name.rpartition('.')[0]}",)))
    return found
