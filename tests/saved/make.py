"""Saves objects that users keep on disk, with the installed diptych: `python tests/saved/make.py FOLDER`.

The files beside this one are of commit ff111d3; test_saved.py loads them with the code as it is now.
"""

from __future__ import annotations

import pickle
import sys
import warnings
from pathlib import Path

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import torch

import diptych.jax as dj
import diptych.torch as dt
from diptych.common import RECIPES, DelayedScaling, MXFP8Quantizer

SAVED = {"fp8-delayed": DelayedScaling(amax_history_len=4)}  # by recipes that keep different states
SAVED |= {name: RECIPES[name] for name in ("fp8-current", "mxfp8", "nvfp4")}


def normal(*shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).standard_normal(shape, np.float32)).bfloat16()


def model(recipe: str) -> torch.nn.Module:
    torch.manual_seed(0)
    layers = dt.Linear(32, 32), dt.LayerNormLinear(32, 32), dt.LayerNormMLP(32, 64)
    net = torch.nn.Sequential(*layers).bfloat16()
    with dt.autocast(recipe=SAVED[recipe]):
        net(normal(32, 32)).sum().backward()
    net.zero_grad()
    return net


def save(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in SAVED:
        net = model(name)
        torch.save(net, folder / f"module_{name}.pt")
        torch.save(net.state_dict(), folder / f"states_{name}.pt")
        with torch.no_grad(), dt.autocast(recipe=SAVED[name]):
            torch.save(net.eval()(normal(32, 32)), folder / f"result_{name}.pt")
    for name in ("fp8-current", "mxfp8"):
        with dt.quantized_model_init(recipe=RECIPES[name]):
            torch.manual_seed(0)
            held = dt.Linear(32, 32, dtype=torch.bfloat16)
            groups = dt.GroupedLinear(2, 32, 32, dtype=torch.bfloat16)
        torch.save(held.state_dict(), folder / f"held_{name}.pt")
        torch.save(torch.nn.ModuleList([held, groups]), folder / f"held_module_{name}.pt")
        values = [p.dequantize() if hasattr(p, "dequantize") else p for p in held.parameters()]
        torch.save([v.detach() for v in values], folder / f"held_values_{name}.pt")
    accumulating = dt.Linear(32, 32, fuse_wgrad_accumulation=True, delay_wgrad_compute=True)
    accumulating.weight.main_grad = torch.zeros(32, 32)
    with dt.autocast(recipe=RECIPES["fp8-current"]):
        accumulating(normal(32, 32).float(), is_first_microbatch=True)
    torch.save(accumulating, folder / "accumulating.pt")
    torch.save(dt.quantize(normal(32, 32), MXFP8Quantizer()), folder / "quantized.pt")
    save_jax(folder)


def save_jax(folder: Path) -> None:
    x = jnp.asarray(normal(32, 32).float().numpy())
    held = dj.quantize_params({"kernel": x}, RECIPES["mxfp8"], lambda path, leaf: True)
    (folder / "jax_params.pkl").write_bytes(pickle.dumps(jax.tree.map(np.asarray, held)))
    state = dj.init_state(SAVED["fp8-delayed"])
    (folder / "jax_state.pkl").write_bytes(pickle.dumps(state))

    def dense(a: jax.Array, b: jax.Array) -> jax.Array:
        return dj.dense(a, b, recipe=RECIPES["mxfp8"])

    exported = jax.export.export(jax.jit(dense), disabled_checks=dj.export_safety_checks())(x, x)
    (folder / "jax_program.bin").write_bytes(exported.serialize())
    np.save(folder / "jax_program_result.npy", np.asarray(jax.jit(dense)(x, x)))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    jax.config.update("jax_hlo_source_file_canonicalization_regex", ".*/")
    save(Path(sys.argv[1]))
