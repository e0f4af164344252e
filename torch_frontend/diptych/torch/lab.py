"""Registers torch with the lab: trains the demo model, records its ops, replays other frameworks' ops."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from diptych.common import shapes
from diptych.common.formats import FORMATS, format_by_name
from diptych.common.quantizers import QuantizerRole
from diptych.common.recipes import Recipe
from diptych.lab.frontend import FrontendError, State
from diptych.lab.job import Corruption, Job, Weights
from diptych.lab.trace import Bits, Op, StepTrace
from diptych.torch import functional, gpt, primitives
from diptych.torch.autocast import autocast
from diptych.torch.linear import Linear

# --- training ---


class TorchTrainer:
    """The demo model with its blocks under torch.compile and torch's AdamW."""

    def __init__(self, job: Job, weights: Weights) -> None:
        torch.set_num_threads(job.threads)
        m, o = job.model, job.optim
        self._job, self._device = job, torch.device(job.device)
        self._model = gpt.GPT(width=m.width, layers=m.layers, heads=m.heads, seq=m.seq, vocab=m.vocab)
        if job.corruption is not None:
            parent, _, child = job.corruption.layer.rpartition(".")
            old: Any = self._model.get_submodule(job.corruption.layer)
            corrupted = CorruptedLinear(old.in_features, old.out_features, job.recipe, job.corruption)
            setattr(self._model.get_submodule(parent), child, corrupted)
        self._model.to(self._device)
        self._load(weights)
        self._rates = job.optim.learning_rates()
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), betas=(o.beta1, o.beta2), eps=o.eps, weight_decay=o.weight_decay
        )
        self._steps = 0
        if job.compile:
            for block in self._model.blocks:  # one compilation serves all: they share their code
                block.compile()

    def _loss(self, batch: np.ndarray) -> Tensor:
        tokens = torch.from_numpy(batch).to(self._device, torch.int64)
        with autocast(enabled=self._job.recipe is not None, recipe=self._job.recipe):
            logits = self._model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def _update(self) -> None:
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
        return self._loss(batch).item()

    def traced_step(self, batch: np.ndarray) -> StepTrace:
        self._optimizer.zero_grad()
        with Recorder() as recorder, recorder.watch(self._model), torch.compiler.set_stance("force_eager"):
            loss = self._loss(batch)
            loss.backward()
        activations = {**recorder.activations, "loss": _numpy(loss)}
        gradients = {k: _numpy(p.grad) for k, p in self._model.named_parameters() if p.grad is not None}
        self._update()
        return StepTrace(loss.item(), activations, recorder.ops, gradients)

    def state(self) -> State:
        named = dict(self._model.named_parameters())
        adam = {k: self._optimizer.state.get(p) or {} for k, p in named.items()}
        moments = [
            {k: _numpy(adam[k].get(name, torch.zeros_like(p))) for k, p in named.items()}
            for name in ("exp_avg", "exp_avg_sq")
        ]
        return State(self._steps, {k: _numpy(p) for k, p in named.items()}, *moments)

    def restore(self, state: State) -> None:
        self._load(state.weights)
        self._steps = state.step
        for name, p in self._model.named_parameters():
            self._optimizer.state[p] = {
                "step": torch.tensor(float(state.step)),
                "exp_avg": torch.from_numpy(state.first[name].copy()).to(self._device),
                "exp_avg_sq": torch.from_numpy(state.second[name].copy()).to(self._device),
            }

    def _load(self, weights: Weights) -> None:
        self._model.load_state_dict({k: torch.from_numpy(v) for k, v in weights.items()})


# --- the self-test's fault ---


class CorruptedLinear(Linear):
    """A Linear whose weight scale is multiplied by a factor before every forward product.

    The backward products use the right scales, so that the fault stays where it was put.
    """

    def __init__(self, in_features: int, out_features: int, recipe: Recipe | None, corruption: Corruption) -> None:
        super().__init__(in_features, out_features)
        assert recipe is not None
        self.recipe, self.factor = recipe, corruption.factor

    @torch.compiler.disable(reason="a deliberate fault")
    def forward(self, x: Tensor) -> Tensor:
        return _CorruptedProduct.apply(x, self.weight, self.bias, self.recipe, self.factor)


class _CorruptedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, recipe: Recipe, factor: float) -> Tensor:
        qx, qw = (_quantized(recipe, t, v) for t, v in (("input", x), ("weight", weight)))
        ctx.recipe, ctx.qx, ctx.qw = recipe, qx, qw
        scale = qw.rowwise_scale_inv
        scale.copy_((scale.float() * factor).to(scale.dtype))
        return functional.gemm(qx, qw, bias=bias, out_dtype=x.dtype, fast_accum=recipe.fast_accum("fprop"))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # dgrad reads the columnwise copy: not touched
        (dy,) = grads
        qdy = _quantized(ctx.recipe, "grad_output", dy)
        dx = functional.gemm(qdy, ctx.qw, trans_b=False, out_dtype=dy.dtype)
        dw = functional.gemm(qdy, ctx.qx, trans_a=True, trans_b=False, out_dtype=dy.dtype)
        return dx, dw, functional.bias_grad(dy), None, None


def _quantized(recipe: Recipe, tensor: str, x: Tensor) -> Any:
    return functional.quantize(x.detach(), recipe.quantizer(QuantizerRole(module="linear", tensor=tensor)))


# --- recording ---


class Recorder(TorchDispatchMode):
    """While it is entered, every diptych op that reaches the dispatcher is kept, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Op] = []
        self.activations: dict[str, np.ndarray] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace == "diptych":
            names = [a.name for a in func._schema.arguments]
            given = dict(zip(names, args, strict=False)) | (kwargs or {})
            self.ops.append(_op(func._opname, given, list(out) if isinstance(out, (list, tuple)) else [out]))
        return out

    @contextlib.contextmanager
    def watch(self, model: gpt.GPT) -> Iterator[None]:
        """Keeps the activations that the lab names, by hooks on the model's modules."""
        at_input = {"softmax": "scores", "proj": "attention", "norm2": "residual"}
        modules = {"norm": model.norm, "head": model.head}
        for i, block in enumerate(model.blocks):
            modules |= {f"blocks.{i}.{k}": v for k, v in block.named_children()} | {f"blocks.{i}": block}

        def hook(name: str) -> Callable[..., None]:
            prefix, _, last = name.rpartition(".")

            def keep(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
                if name == "blocks.0":
                    self.activations["embed"] = _numpy(inputs[0])
                if last in at_input:
                    self.activations[f"{prefix}.{at_input[last]}"] = _numpy(inputs[0])
                self.activations[f"{name}.output" if last.isdigit() else name] = _numpy(output)

            return keep

        handles = [module.register_forward_hook(hook(name)) for name, module in modules.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _numpy(t: Tensor) -> np.ndarray:
    return t.detach().to("cpu", copy=True).numpy()


_BIT_DTYPES = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}


def _bits(t: Tensor) -> Bits:
    t = t.detach().to("cpu", copy=True).contiguous()
    return Bits(_name(t.dtype), t.view(_BIT_DTYPES[t.element_size()]).numpy())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _op(kind: str, given: dict[str, Any], outs: list[Tensor]) -> Op:
    """A recorded call in the lab's terms."""
    inputs = {k: _bits(v) for k, v in given.items() if isinstance(v, Tensor)}
    if kind == "quantize":
        quantizer = given["quantizer"]
        names = [b.name for b in shapes.quantize_buffers(tuple(given["x"].shape), quantizer)]
        return Op(kind, inputs, {"quantizer": quantizer}, {k: _bits(v) for k, v in zip(names, outs, strict=True)})
    if kind == "gemm":
        options = {s: (FORMATS[given[f"{s}_format"]].name, given[f"{s}_columnwise"]) for s in "ab"}
        options |= {"alpha": given["alpha"], "beta": 0.0, "fast_accum": given["fast_accum"]}
        return Op(kind, inputs, options | {"out_dtype": _name(given["out_dtype"])}, {"d": _bits(outs[0])})
    if kind == "dequantize":
        options = {"format": FORMATS[given["format"]].name, "columnwise": given["columnwise"]}
        return Op(kind, inputs, options | {"dtype": _name(given["dtype"])}, {"out": _bits(outs[0])})
    if kind in ("bias_grad", "amax"):
        options = {"dtype": _name(given["dtype"])} if "dtype" in given else {}
        return Op(kind, inputs, options, {"out": _bits(outs[0])})
    raise NotImplementedError(f"recording diptych::{kind} is not supported")


# --- replay ---


class TorchFrontend:
    """torch's adapter; see `diptych.lab.frontend.Frontend`."""

    name = "torch"

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
        o = op.options
        if op.kind == "quantize":
            names = [b.name for b in shapes.quantize_buffers(tuple(x["x"].shape), o["quantizer"])]
            out = dict(zip(names, primitives.quantize(x["x"], o["quantizer"], x.get("amax")), strict=True))
        elif op.kind == "gemm":
            a, b = ((x[f"{s}_data"], x[f"{s}_scale_inv"], format_by_name(o[s][0]).id, o[s][1]) for s in "ab")
            dtype = getattr(torch, o["out_dtype"])
            out = {"d": primitives.gemm(a, b, x.get("bias"), o["alpha"], dtype, o["fast_accum"])}
        elif op.kind == "bias_grad":
            out = {"out": primitives.bias_grad(x["dy"], getattr(torch, o["dtype"]))}
        elif op.kind == "dequantize":
            copy = (x["data"], x["scale_inv"], format_by_name(o["format"]).id, o["columnwise"])
            out = {"out": primitives.dequantize(copy, getattr(torch, o["dtype"]))}
        else:
            out = {"out": primitives.amax(x["x"])}
        return {k: _bits(out[k]) for k in op.outputs}

    @torch.no_grad()
    def apply(self, kind: str, inputs: list[np.ndarray], heads: int) -> np.ndarray:
        ops: dict[str, Callable[..., Tensor]] = {
            "embedding": lambda tokens, embed, position: F.embedding(tokens, embed) + position[: tokens.shape[-1]],
            "layer norm": lambda x, weight, bias: F.layer_norm(x, x.shape[-1:], weight, bias),
            "attention scores": lambda qkv: gpt.attention_scores(*gpt.split_heads(qkv, heads)[:2]),
            "softmax": lambda x: x.softmax(dim=-1),
            "attention values": lambda p, qkv: gpt.attention_values(p, qkv, heads),
            "residual add": torch.add,
            "gelu": F.gelu,
            "head matmul": F.linear,
            "cross entropy": lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten().long()),
        }
        return ops[kind](*(torch.tensor(x) for x in inputs)).numpy()


frontend = TorchFrontend()
