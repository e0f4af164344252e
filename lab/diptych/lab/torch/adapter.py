"""Registers torch with the lab: trains the demo model, replays recorded operations, and feeds models in a bisection."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from diptych.lab.capture import EVERYTHING
from diptych.lab.frontend import FrontendError, State
from diptych.lab.job import Job, Weights
from diptych.lab.replay.op import Bits, Op
from diptych.lab.torch import gpt, own_ops, table_ops
from diptych.lab.torch.capture import capture
from diptych.lab.torch.feed import Feeder
from diptych.torch.state.autocast import autocast
from diptych.torch.tensors.quantized import QuantizedTensor

# --- training ---


class TorchTrainer:
    """A trainer of the demo model, with its blocks under torch.compile and torch's AdamW."""

    def __init__(self, job: Job, weights: Weights) -> None:
        torch.set_num_threads(job.threads)
        m, o = job.model, job.optim
        self._job, self._device = job, torch.device(job.device)
        self._model = gpt.GPT(
            width=m.width, layers=m.layers, heads=m.heads, seq=m.seq, vocab=m.vocab, high_blocks=m.high_blocks,
            linear_dtype=getattr(torch, job.linear_dtype),
        )  # fmt: skip
        self._linears: dict[str, Any] = {name: self._model.get_submodule(name) for name in m.linears}
        if job.corruption is not None:
            assert job.recipe is not None
            faulty = self._linears[job.corruption.layer]
            faulty.recipe = job.corruption.recipe(job.recipe, _spoil)
            faulty.forward = torch.compiler.disable(faulty.forward, reason="a deliberate fault")
        self._model.to(self._device)
        self._load(weights)
        for name, offset in job.streams().items():
            self._linears[name].seed_rng(job.seed, offset)
        self._rates = job.optim.learning_rates()
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), betas=(o.beta1, o.beta2), eps=o.eps, weight_decay=o.weight_decay
        )
        self._steps = 0
        if job.compile:
            for block in self._model.blocks:  # blocks share their code, so that one compilation serves all
                block.compile()

    def _loss(self, batch: np.ndarray) -> Tensor:
        tokens = torch.from_numpy(batch).to(self._device, torch.int64)
        with autocast(enabled=self._job.recipe is not None, recipe=self._job.recipe):
            logits = self._model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def _update(self) -> None:
        clip = self._job.optim.clip
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), clip)
        for group in self._optimizer.param_groups:
            group["lr"] = float(self._rates[self._steps])
        self._optimizer.step()
        self._steps += 1

    def step(self, batch: np.ndarray) -> float:
        self._optimizer.zero_grad()
        loss = self._loss(batch)
        loss.backward()
        self._update()
        return loss.item()

    @torch.no_grad()
    def evaluate(self, batch: np.ndarray) -> float:
        streams = {linear: linear.rng_state.clone() for linear in self._linears.values() if self._job.streams()}
        self._model.eval()  # scales are not updated
        try:
            return self._loss(batch).item()
        finally:
            self._model.train()
            for linear, rng in streams.items():
                linear.rng_state.copy_(rng)

    @contextlib.contextmanager
    def captured(self, out: pathlib.Path) -> Iterator[Callable[[np.ndarray], float]]:
        with capture(self._model, out=out, **EVERYTHING) as trace:

            def step(batch: np.ndarray) -> float:
                loss = self.step(batch)
                trace.step()
                return loss

            yield step

    def state(self) -> State:
        named = dict(self._model.named_parameters())
        adam = {k: self._optimizer.state.get(p) or {} for k, p in named.items()}
        first, second = (
            {k: _numpy(adam[k].get(name, torch.zeros_like(p))) for k, p in named.items()}
            for name in ("exp_avg", "exp_avg_sq")
        )
        quantizing = {k: _numpy(v) for k, v in self._model.state_dict().items() if k not in named}
        return State(self._steps, {k: _numpy(p) for k, p in named.items()}, first, second, quantizing)

    def scales(self) -> dict[str, float]:
        tensors = {k: v for k, v in self._model.named_buffers() if ".scale_states." in k and k.endswith(".scale")}
        if not tensors:
            return {}
        values = torch.cat(list(tensors.values())).tolist()  # a single transfer to the host for all values
        names = [k.removesuffix(".scale").replace(".scale_states", "") for k in tensors]
        return dict(zip(names, values, strict=True))

    def restore(self, state: State) -> None:
        self._load(state.weights, state.quantizing)
        self._steps = state.step
        for name, p in self._model.named_parameters():
            self._optimizer.state[p] = {
                "step": torch.tensor(float(state.step)),
                "exp_avg": torch.from_numpy(state.first[name].copy()).to(self._device),
                "exp_avg_sq": torch.from_numpy(state.second[name].copy()).to(self._device),
            }

    def _load(self, weights: Weights, quantizing: Weights | None = None) -> None:
        both = {**weights, **(quantizing or {})}
        self._model.load_state_dict({k: torch.from_numpy(v.copy()) for k, v in both.items()})


def _spoil(q: QuantizedTensor, factor: float) -> QuantizedTensor:
    """Returns `q` with the self-test's fault; see `Corruption`."""
    if q.quantizer.format.two_level:  # an E4M3 scale cannot hold the factor
        assert q.amax is not None
        q.amax = q.amax * factor
        return q
    scale = q.rowwise_scale_inv
    assert scale is not None
    q.rowwise_scale_inv = (scale.float() * factor).to(scale.dtype)
    return q


def _numpy(t: Tensor) -> np.ndarray:
    return t.detach().to("cpu", copy=True).numpy()


_BIT_DTYPES = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


def _bits(t: Tensor) -> Bits:
    t = t.detach().to("cpu", copy=True).contiguous()
    return Bits(_name(t.dtype), t.view(_BIT_DTYPES[t.element_size()]).numpy())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class TorchFrontend:
    """torch's adapter; see `diptych.lab.frontend.Frontend`."""

    name = "torch"
    updates_together = True

    def versions(self) -> dict[str, str]:
        found = {"torch": importlib.metadata.version("torch")}
        return found | ({"torch's CUDA": torch.version.cuda} if torch.version.cuda else {})

    def device_problem(self, device: str) -> str | None:
        if device == "cuda" and not torch.cuda.is_available():
            return "this torch is built without CUDA" if torch.version.cuda is None else "torch finds no usable GPU"
        return None

    def trainer(self, job: Job, weights: Weights) -> TorchTrainer:
        compilers = (os.environ.get("CXX"), "g++", "clang++")
        if job.compile and job.device == "cpu" and not any(shutil.which(c) for c in compilers if c):
            raise FrontendError(
                "torch.compile needs a C++ compiler, and there is no g++; install it or add --no-compile"
            )
        return TorchTrainer(job, weights)

    @torch.no_grad()
    def replay(self, op: Op, device: str) -> dict[str, Bits]:
        x = {k: torch.tensor(v.data).view(getattr(torch, v.dtype)).to(device) for k, v in op.inputs.items()}
        if (run := table_ops.FUNCTIONS.get(op.kind)) is not None:
            return {"out": _bits(run(**x, **op.options))}
        return {k: _bits(v) for k, v in own_ops.replayed(op, x).items() if k in op.outputs}

    def feeder(self, model: Any, device: str) -> Feeder:
        return Feeder(model, device)


frontend = TorchFrontend()
