"""`linear`: the linear layer as one differentiable op, eagerly and as two nodes of a graph (`products.py`)."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from torch import Tensor

from diptych.common.errors import UnsupportedError
from diptych.common.layer_options import ROW, Originals
from diptych.common.layers.checks import Names, other_kind, require_fit
from diptych.common.layers.groups import HIGH_PRECISION
from diptych.common.layers.schedule import Schedule
from diptych.common.recipes import Recipe
from diptych.torch.graph.custom_op import CustomOp
from diptych.torch.graph.program import Replay
from diptych.torch.graph.proto import TensorProto
from diptych.torch.layers.held import given_copies
from diptych.torch.layers.options import CallState, Options, schedule
from diptych.torch.layers.products import (
    LayerArguments,
    finished,
    fprop,
    input_gradient,
    replay,
    result_proto,
    run,
    weight_gradient,
)
from diptych.torch.layers.quantize import (
    encode,
    kept_spec,
    late_scales,
    quantize_calls,
    save_for_late,
    saved_for_late,
)
from diptych.torch.layers.tensor_parallel import (
    Cut,
    gradient_calls,
    require_whole_blocks,
    sum_over_tokens,
    whole_gradients,
    whole_input,
)
from diptych.torch.primitives import gemm as gemm_ops
from diptych.torch.primitives.checks import require_device, require_high_precision, require_local
from diptych.torch.private.dispatch import any_autocast
from diptych.torch.state.autocast import recording
from diptych.torch.state.scales import ScaleStates
from diptych.torch.tensors.copies import pack, pick, unpack
from diptych.torch.tensors.quantized import QuantizedStack, QuantizedTensor, QuantizedTensorBase, high_precision

# --- the op ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Arguments(LayerArguments):
    """One call of a linear layer. `x_copy`: if x is quantized, the tensors of the copy that backward reads."""

    recordable_backward: ClassVar[bool] = True  # the same as `recordable`, for a backward that writes to no buffer

    x: Tensor | QuantizedTensor
    weight: Tensor | QuantizedTensor
    bias: Tensor | None
    rng: Tensor | None
    x_copy: list[Tensor]

    def wanted(self, needs: tuple[str, ...]) -> tuple[tuple[bool, bool], ...]:
        return (("x" in needs, "weight" in needs),)

    def kept_operands(self, needs: tuple[str, ...], schedules: tuple[Schedule, ...]) -> tuple[str, ...]:
        return ("x",) if _keeps_x(schedules[0]) else ("x_copy",)


def _forward(a: _Arguments, needs: tuple[str, ...]) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    if a.options is not None:  # a repeated program skips this: its tensors' forms were checked when it was recorded
        _require_fit(a.x, a.weight, a.bias)
    s = a.schedules(needs)[0]
    (options,), amaxes = a.forward_options(needs)
    if options.cut is not None:
        if isinstance(a.x, QuantizedTensor):
            raise UnsupportedError(
                f"{options.module}: a layer that is cut over ranks takes no quantized input; call dequantize() on it"
            )
        require_whole_blocks(options.module, s, options.cut, tuple(a.x.shape[:-1]), a.weight)
    y, encoded_x, encoded_w = fprop(a.x, a.weight, a.bias, s, options)
    saved: list[Tensor] = []
    a.pack_weight(0, s, options, encoded_w, saved)
    if s.x_late:
        save_for_late(a.x, s.x, s.x_late, options, encoded_x.amax, saved)
    elif "weight" in needs and not (_keeps_x(s) or a.x_copy):
        pack(pick(s.x_kept, encoded_x.copies, a.x), saved)
    return (finished(y, s, options), *amaxes), saved


def _layout(a: _Arguments, needs: tuple[str, ...]) -> tuple[TensorProto, ...]:
    return (result_proto(a.x, a.weight.shape[0], a.schedules(needs)[0], a.cut(0)), *a.amax_protos(needs))


def _keeps_x(s: Schedule) -> bool:
    return bool(s.x_late) or s.x_kept == "original"


def _backward(
    a: _Arguments,
    needs: tuple[str, ...],
    saved: list[Tensor],
    grads: list[Tensor | None],
    asked: tuple[str, ...] | None = None,
) -> list[Tensor]:
    s, options, dy = a.schedules(needs)[0], a.backward_options(needs)[0], grads[0]
    assert dy is not None
    cut, now = options.cut, needs if asked is None else asked
    part = a.schedules(needs, asked)[0]
    copies = quantize_calls(dy, gradient_calls(part.dy, cut), options)
    of_dgrad, of_wgrad = whole_gradients(dy, copies, part, cut)
    made: dict[str, Any] = {}
    w = a.kept_weight(0, s, options, saved, "x" in now) if "x" in needs else None
    x = whole_input(lambda: _kept_input(a, s, options, saved), cut) if "weight" in now else None
    if "x" in now:
        dx = input_gradient(of_dgrad.finish(), w, a.x, s, options, a.x.shape[-1])
    if x is not None:
        made["weight"] = weight_gradient(of_wgrad.finish(), x.finish(), a.weight.dtype, s, options)
    if "x" in now:
        made["x"] = dx.finish()
    if "bias" in now:
        assert a.bias is not None
        made["bias"] = sum_over_tokens(_bias_gradient(dy, a.bias.dtype, a.recipe, cut), cut, ROW)
    a.log_amaxes()
    return [made[name] for name in a.gradients(now)]


def _bias_gradient(dy: Tensor, dtype: torch.dtype, recipe: Recipe, cut: Cut | None) -> Tensor:
    """Returns the bias's gradient. A whole layer in high precision outside of regions gives nn.Linear's bits, which
    torch sums in an order of its own, so that options about the weight's gradient do not change them."""
    if cut is None and recipe == HIGH_PRECISION:
        return dy.reshape(-1, dy.shape[-1]).sum(0).to(dtype)
    return gemm_ops.bias_grad(dy, dtype)


def _kept_input(a: _Arguments, s: Schedule, options: Options, saved: list[Tensor]) -> Any:
    """Returns the operand that wgrad reads for the input, made from the original if backward keeps that."""
    if isinstance(a.x, Tensor):
        x: Any = high_precision("linear", a.x)
    else:
        x = unpack(kept_spec(s.x_kept, s.plan.input), list(a.x_copy) or saved)
    if not s.x_late:
        return x
    scales, amax = saved_for_late(s.x, s.x_late, options, saved)
    return pick(s.x_kept, encode(x, s.x_late, options, scales, amax).copies, x)


def _held(weight: Any, columnwise: bool) -> tuple[Any, list[Tensor]]:
    """Returns the values by which programs tell copies of held weights apart, and the copy's tensors."""
    tensors: list[Tensor] = []
    spec = pack(weight.copy_of(columnwise), tensors)
    return (weight.quantizer.spec, weight.quantizer.rowwise, weight.quantizer.columnwise, spec), tensors


def _forward_replay(a: _Arguments, needs: tuple[str, ...]) -> Replay | None:
    if a.options is None or isinstance(a.x, QuantizedTensor):
        return None
    s = a.schedules(needs)[0]
    if s.results[0] is not None:
        return None
    bias = [] if a.bias is None else [a.bias]
    leaves = a.options[0].weight_grad is not None and not a.options[0].weight_grad.marks
    key = (needs, a.weight.shape, leaves, a.rng is None)
    if isinstance(a.weight, QuantizedTensorBase):
        if s.plan.weight.rowwise is None or a.weight.rowwise_data is None or a.weight.quantizer.custom:
            return None
        form, copy = _held(a.weight, False)
        return replay((*key, form), s, a.options[0], (s.x,), a.rng, [a.x, *copy, *bias])
    if a.copies:
        return replay((*key, a.copy_specs(0)), s, a.options[0], (s.x,), a.rng, [a.x, a.weight, *bias, *a.copies])
    return replay(key, s, a.options[0], (s.x, s.w), a.rng, [a.x, a.weight, *bias])


def _backward_replay(
    a: _Arguments,
    needs: tuple[str, ...],
    saved: list[Tensor],
    grads: list[Tensor | None],
    asked: tuple[str, ...] | None = None,
) -> Replay | None:
    """Returns the `Replay` of a backward, or None. Makes dy in `grads` contiguous, as quantizing it would."""
    if a.options is None or a.options[0].weight_grad is not None or a.x_copy:
        return None
    s = a.schedules(needs)[0]
    dy = grads[0]
    high = not s.dy or "original" in (s.x_kept, s.w_kept) or s.plan.dequantized_backward
    if high or s.results[1] is not None or s.results[2] is not None or dy is None:
        return None
    if dy.layout is torch.strided:
        dy = grads[0] = dy.contiguous()
    kept, form = [t for t in (a.x, a.weight) if isinstance(t, Tensor)], None
    if isinstance(a.weight, QuantizedTensorBase):
        if a.weight.quantizer.custom:
            return None
        form, copy = _held(a.weight, s.w_kept == "columnwise")
        kept = [*kept[:-1], *copy]
    if any([isinstance(t, QuantizedTensorBase) for t in kept]):
        return None
    dtypes = a.x.dtype, a.weight.dtype, None if a.bias is None else a.bias.dtype
    inputs = [dy, *kept, *a.copies, *saved]
    if s.w_late or s.x_late:
        inputs += late_scales((*s.w_late, *s.x_late), a.options[0])
    calls = ((s if asked is None else a.schedules(needs, asked)[0]).dy,)
    return replay((needs, a.weight.shape, a.copy_specs(0), form, *dtypes), s, a.options[0], calls, a.rng, inputs)


_linear = CustomOp(
    "diptych::linear", _Arguments, _forward, _layout, _backward,
    keeps=_Arguments.keeps, gradients=_Arguments.gradients, draws=_Arguments.draws, parts=True,
    forward_replay=_forward_replay, backward_replay=_backward_replay,
)  # fmt: skip


# --- as users call it ---

NAMES = Names("linear", "input", "weight")


def _require_fit(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Checks the operands of the three products."""
    require_high_precision("linear", "input", x)
    require_high_precision("linear", "weight", weight)
    if bias is not None:
        require_high_precision("linear", "bias", bias)
    of_weight = weight.shape
    if len(of_weight) != 2 or x.shape[-1:] != of_weight[1:] or (bias is not None and bias.shape != of_weight[:1]):
        if isinstance(weight, QuantizedStack):
            raise other_kind(NAMES, weight, QuantizedTensor)
        require_fit(NAMES, 2, x, weight, bias)
    require_device("linear", x, weight, "weight")
    require_device("linear", x, bias, "bias")


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    recipe: Recipe,
    *,
    module: str = "linear",
    name: str = "",
    state: ScaleStates | None = None,
    rng: Tensor | None = None,
    amax_group: Any = None,
    record: bool = True,
    save_original_input: bool = False,
    save_original_weight: bool = False,
) -> Tensor:
    """Computes x @ weight.T + bias with operands quantized as a recipe says. It can be differentiated once.

    **Arguments:** `x`: [..., K], which `torch.amp.autocast` casts to its dtype first; or a QuantizedTensor of the input
    role's format. Of a quantized x, fprop reads the rowwise copy, wgrad the columnwise one, and a product that the
    recipe leaves in high precision the dequantized values; delayed scaling records no amax of it. `weight`: [N, K],
    quantized from its own dtype, or a QuantizedTensor with the copies that are needed. `bias`: [N]. All float32,
    bfloat16 or float16, in any mixture. `module`, `name`: the module and the name in the roles for which the recipe
    chooses quantizers. `state`: the scales of delayed scaling, whose histories record the amaxes, also those of
    gradients, if the call is made in grad mode, outside of `dry_run` and with `record=True`. `rng`: int32 [4], the
    state of the random generator of stochastic rounding (`rng_state`). The call uses the next 18 offsets, and the
    caller advances the state. `amax_group`: the process group over which amaxes are reduced. `save_original_input`,
    `save_original_weight`: backward keeps x, or the weight, in place of the quantized copy that it reads, and makes
    that copy again with the same bits. Copies of a QuantizedTensor, and of a weight that the user's own code quantizes,
    are kept as they are.

    **Returns:** [..., N] in x's (or autocast's) dtype; a QuantizedTensor if the recipe quantizes the output. Its
    gradient, and that of a quantized x, is a plain tensor.

    **Raises:** TypeError for dtypes or a missing `state` or `rng`, ValueError for shapes, mixed devices, a recipe
    whose operands do not fit, or an x that is quantized in another format or lacks a copy, NotImplementedError for a
    second derivative, or a quantized x of another dtype than autocast's.
    """
    require_local("linear", "rng", rng)
    originals = Originals(save_original_input, save_original_weight)
    options = Options(module, name, originals, record and recording(), amax_group, CallState(state, rng))
    return linear_with(x, weight, bias, recipe, options)


def linear_with(x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe, options: Options) -> Tensor:
    """Runs `linear` with `Options`."""
    if torch.compiler.is_compiling() or any_autocast():
        device_type = x.device.type
        if not x.is_meta and torch.is_autocast_enabled(device_type):
            x = x.to(torch.get_autocast_dtype(device_type))
    quantized = isinstance(x, QuantizedTensor)
    if quantized or torch.compiler.is_compiling():
        _require_fit(x, weight, bias)
    x_copy: list[Tensor] = []
    if quantized:
        options = options._replace(originals=options.originals._replace(input=False))  # nothing to quantize again
        s = schedule(recipe, options.module, options.name, False, torch.is_grad_enabled() and weight.requires_grad)
        copies = given_copies(x, s)
        if s.x_kept not in ("", "original"):
            pack(pick(s.x_kept, copies, x), x_copy)
    return run(_linear, x, recipe, (options,), weight, bias, options.state.rng, x_copy)[0]
