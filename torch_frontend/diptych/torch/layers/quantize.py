"""How a layer quantizes its input, its weight and its gradient."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from diptych.common.errors import ArgumentError, UnsupportedError
from diptych.common.layers.checks import Names, missing_rng, require_quantizable, require_stackable
from diptych.common.layers.plan import TensorPlan
from diptych.common.layers.schedule import OFFSETS, Call, late_states
from diptych.common.ops.shapes import rows_cols
from diptych.common.quantizers import copy_format_id
from diptych.torch.functional import quantize as quantize_verbs
from diptych.torch.functional import source as sources
from diptych.torch.functional.amax_group import group_amaxes
from diptych.torch.functional.source import FusedInput
from diptych.torch.graph import program
from diptych.torch.layers.options import Options
from diptych.torch.layers.tensor_parallel import placed
from diptych.torch.primitives import grouped as grouped_ops
from diptych.torch.primitives import quantize as quantize_ops
from diptych.torch.primitives.checks import dtype_name
from diptych.torch.primitives.register import define, direct, wrote
from diptych.torch.private.autograd import backward_pass
from diptych.torch.private.dispatch import jit_traces
from diptych.torch.state.checkpoint import SAVED, aside, require_saved, selective, tape_call, taped_call
from diptych.torch.state.scales import ScaleStates, StepScales, record_amax
from diptych.torch.tensors.copies import Copies, Spec
from diptych.torch.tensors.quantized import QuantizedTensor

STACK = Names("grouped_linear", "input", "weight")


class Encoded(NamedTuple):
    """The copies of a tensor, its amax ([1], for a stack [G]) if a tensorwise format has computed one, and its sum over
    the rows if it was requested."""

    copies: Copies
    amax: Tensor | None = None
    column_sum: Tensor | None = None


def quantize_calls(
    t: Tensor, calls: tuple[Call, ...], options: Options, scales: dict[str, Tensor] | None = None
) -> Copies:
    """Returns the copies of one tensor. `scales`: delayed scales to use, recording nothing; None takes the states'."""
    return encode(t, calls, options, scales).copies


def encode(
    t: Tensor,
    calls: tuple[Call, ...],
    options: Options,
    scales: dict[str, Tensor] | None = None,
    amax: Tensor | None = None,
) -> Encoded:
    """Returns the copies of one tensor and its amax. `scales`: delayed scales to use, recording nothing; None takes
    those of the states. `amax`: the amax that tensorwise formats use; None lets them compute it."""
    rowwise = columnwise = found = None
    for call in calls:
        # Dynamo cannot read a quantizer's format; while it traces, the op's own check refuses.
        if not torch.compiler.is_dynamo_compiling() and call.quantizer.format.pack > 1:
            require_quantizable(options.module, options.name, tuple(t.shape), dtype_name(t.dtype), call.quantizer)
        if call.plain and amax is not None and has_one_amax(call):
            buffers = quantize_ops.quantize_again(t, call.quantizer, amax)
        elif call.plain and (options.group is None or not call.reducible):
            buffers = quantize_ops.quantize(t, call.quantizer)
            found = buffers[-1] if has_one_amax(call) else found
        elif call.state and not call.quantizer.custom:
            buffers = _quantize_delayed(t, call, options, scales)
        elif call.quantizer.custom or options.group is not None:
            q = quantize_general(t, call, options, scales)
            rowwise = q.copy_of(False) if q.rowwise_data is not None else rowwise
            columnwise = q.copy_of(True) if q.columnwise_data is not None else columnwise
            found = q.amax if has_one_amax(call) else found
            continue
        else:
            given = amax if has_one_amax(call) else None
            buffers = quantize_ops.quantize(t, call.quantizer, given, rng=rng_of(t, call, options))
            found = buffers[-1] if has_one_amax(call) else found
        r, c = quantize_ops.copies(call.quantizer, buffers)
        rowwise, columnwise = rowwise if r is None else r, columnwise if c is None else c
    return Encoded((rowwise, columnwise), found)


def quantize_weight(
    weight: Tensor,
    calls: tuple[Call, ...],
    options: Options,
    scales: dict[str, Tensor] | None = None,
    amax: Tensor | None = None,
) -> Encoded:
    """Encodes a weight, or a stack [G, N, K]; `scales`, `amax`: as for `encode`. Each weight of a stack has its own
    scales and amaxes; under delayed scaling all share one scale, whose history gets the largest amax."""
    if weight.dim() != 3:
        return encode(weight, calls, options, scales, amax)
    require_stackable(STACK, calls)
    rowwise = columnwise = found = None
    for call in calls:
        each = history = None
        given: tuple[Tensor | None, Tensor | None] = (amax if has_one_amax(call) else None, None)
        if call.state:
            scale, history = scale_of(call, options, scales)
            each = scale.expand(weight.shape[0]).contiguous()
        elif options.group is not None and call.reducible and given[0] is None:
            given = group_amaxes(weight, call.quantizer, options.group, grouped_ops.amaxes)
        buffers = grouped_ops.quantize_stack(weight, call.quantizer, *given, each)
        if history is not None:
            record_amax(history, buffers[-1].amax(0, keepdim=True))
        found = buffers[-1] if has_one_amax(call) else found
        r, c = quantize_ops.copies(call.quantizer, buffers)
        rowwise, columnwise = rowwise if r is None else r, columnwise if c is None else c
    return Encoded((rowwise, columnwise), found)


def rng_of(t: Tensor | FusedInput, call: Call, options: Options) -> Tensor | None:
    """Returns the random state that a call on t draws from: [4], or [8] where t is a part of a tensor that is cut over
    ranks."""
    if not call.needs_rng:
        return None
    rng = options.state.rng
    if rng is None:
        raise missing_rng(options.module, call.quantizer)
    own = rng[call.number] if rng.dim() == 2 else rng_at(rng, 2 * call.number)
    if options.cut is None:
        return own
    shape = t.shape if isinstance(t, Tensor) else sources.encoded_shape("quantize", t)
    return placed(own, call, rows_cols(tuple(shape)), options.cut)


def scale_of(call: Call, options: Options, scales: dict[str, Tensor] | None) -> tuple[Tensor, Tensor | None]:
    """Returns the delayed scale of a call, and the history in which to record its amax, or None. Under a selective
    checkpoint a recomputation must run the same ops as its forward, so it records in a history that is dropped."""
    if scales is not None:
        scale = scales[call.state]
        same = scales is options.state.recomputed and options.record and selective()
        return scale, aside(torch.zeros_like, scale) if same else None
    states = options.state.states
    if states is None:
        raise ArgumentError(
            f"{options.module}: {call.quantizer.described()} scales by earlier steps' amaxes and needs state=, a "
            "diptych.torch.ScaleStates; diptych.torch.Linear holds one"
        )
    scale, history = states.tensors(call.state)
    return scale, history if options.record else None


def _quantize_delayed(t: Tensor, call: Call, options: Options, scales: dict[str, Tensor] | None) -> list[Tensor]:
    scale, history = scale_of(call, options, scales)
    if history is None:
        return quantize_ops.quantize(t, call.quantizer, scale=scale)
    return quantize_ops.quantize_delayed(t, call.quantizer, scale, history)


def quantize_general(t: Tensor, call: Call, options: Options, scales: dict[str, Tensor] | None) -> QuantizedTensor:
    """Quantizes by the verb `quantize`, for a user's own quantizer or an amax that is reduced over a process group."""
    if call.quantizer.custom:
        program.refuse()
    given: dict[str, Any] = {}
    history = None
    if call.state:
        given["scale"], history = scale_of(call, options, scales)
    if call.needs_rng:
        given["rng"] = rng_of(t, call, options)
    if options.group is not None and call.reducible:
        given["amax_group"] = options.group
    q = quantize_verbs.quantize(t.detach(), call.quantizer, **given)
    wanted = call.quantizer
    if not isinstance(q, QuantizedTensor) or any(
        want and getattr(q, f"{side}_data") is None
        for side, want in (("rowwise", wanted.rowwise), ("columnwise", wanted.columnwise))
    ):
        raise ArgumentError(
            f"{options.module}: quantize_impl of {type(wanted).__name__} must return a QuantizedTensor with the copies "
            f"of {wanted}, such as `quantize` makes, got {q!r}"
        )
    if history is not None and q.amax is not None:
        record_amax(history, q.amax)
    return q


def has_one_amax(call: Call) -> bool:
    """Returns whether the core, quantizing by this call, computes a single amax, which is that of the whole tensor."""
    return call.reducible and not (quantize_ops.TWO_LEVEL[call.quantizer.spec.format_id] or call.quantizer.custom)


def quantize_operand(
    t: Tensor | FusedInput,
    calls: tuple[Call, ...],
    options: Options,
    scales: dict[str, Tensor] | None = None,
    *,
    amax: Tensor | None = None,
    sum_dtype: torch.dtype | None = None,
) -> Encoded:
    """Returns the copies of a tensor or a FusedInput; `scales`, `amax`: as for `encode`. For a FusedInput, `sum_dtype`
    requests the sum over the rows in that dtype."""
    if isinstance(t, Tensor):
        return encode(t, calls, options, scales, amax)
    rowwise = columnwise = found = total = None
    for call in calls:
        one_amax = has_one_amax(call)
        wanted = sum_dtype if total is None else None
        scale = history = None
        given: tuple[Tensor | None, Tensor | None] = (amax if one_amax else None, None)
        if call.state:
            scale, history = scale_of(call, options, scales)
        elif options.group is not None and call.reducible and given[0] is None:
            given = group_amaxes(t, call.quantizer, options.group, sources.amax)
        if history is not None and scale is not None:
            buffers = sources.quantize_delayed(t, call.quantizer, scale, history, wanted)
        else:
            buffers = sources.quantize(t, call.quantizer, *given, scale, rng_of(t, call, options), wanted)
        if wanted is not None:
            total, buffers = buffers[-1], buffers[:-1]
        r, c = quantize_ops.copies(call.quantizer, buffers)
        rowwise, columnwise = rowwise if r is None else r, columnwise if c is None else c
        if one_amax:
            found = buffers[-1]
    return Encoded((rowwise, columnwise), found, total)


def requantized_result(t: Tensor, call: Call | None, options: Options) -> Tensor:
    """Returns a result quantized and dequantized by `call`; with None, the result itself."""
    if call is None:
        return t
    single = call._replace(quantizer=call.quantizer.with_usage(rowwise=True, columnwise=False))
    copy = quantize_calls(t, (single,), options)[0]
    assert copy is not None
    return quantize_ops.dequantize(copy, t.dtype).reshape(t.shape)


# --- copies that backward reads or makes ---


def kept_spec(kept: str, plan: TensorPlan) -> Spec:
    """Returns the spec by which `unpack` rebuilds the copy that backward reads."""
    if kept == "original":
        return None
    quantizer = plan.rowwise if kept == "rowwise" else plan.columnwise
    assert quantizer is not None
    columnwise = kept == "columnwise"
    format_id = copy_format_id(quantizer.spec, columnwise)
    return format_id, columnwise, quantize_ops.TWO_LEVEL[format_id]


def save_for_late(
    t: Tensor | FusedInput, calls: tuple[Call, ...], late: tuple[Call, ...], options: Options, amax: Tensor | None,
    saved: list[Tensor],
) -> None:  # fmt: skip
    """Saves the scales and the amax with which backward makes the copies of `late` from the original t, so that they
    have the bits that forward would give them. Forward made the copies of `calls` and found `amax`. Records the amax of
    t in the states that only `late` uses."""
    if not _keeps_scales(options):
        saved += [scale_of(c, options, options.state.recomputed)[0].clone() for c in late if c.state]
    if _share_amax(calls, late):
        assert amax is not None
        saved.append(amax)
    states, _, recomputed, _ = options.state
    if states is not None and options.record and recomputed is None:
        for name in late_states(calls, late):
            aside(_record_late, name, t, states)


def saved_for_late(
    calls: tuple[Call, ...], late: tuple[Call, ...], options: Options, saved: list[Tensor]
) -> tuple[dict[str, Tensor], Tensor | None]:
    """Takes the scales and the amax of `save_for_late` from the front of `saved`."""
    stated = [c for c in late if c.state]
    found = late_scales(late, options) if _keeps_scales(options) else [saved.pop(0) for _ in stated]
    scales = {c.state: scale for c, scale in zip(stated, found, strict=True)}
    return scales, saved.pop(0) if _share_amax(calls, late) else None


def late_scales(late: tuple[Call, ...], options: Options) -> list[Tensor]:
    """Returns the delayed scales of `late` that the options keep for backward."""
    if not _keeps_scales(options):
        return []
    given = options.state.recomputed
    return [scale_of(c, options, given if given is None else dict(given))[0] for c in late if c.state]


def _keeps_scales(options: Options) -> bool:
    """Returns whether the options keep forward's delayed scales for backward, where no update overwrites them."""
    return isinstance(options.state.states, StepScales)


def _share_amax(calls: tuple[Call, ...], late: tuple[Call, ...]) -> bool:
    return any([has_one_amax(c) for c in calls]) and any([has_one_amax(c) for c in late])


def _record_late(name: str, t: Tensor | FusedInput, state: ScaleStates | StepScales) -> None:
    state.record(name, quantize_ops.amax(t) if isinstance(t, Tensor) else sources.amax(t))


# --- random state ----------------------------------------------------------------------------------------------------


def rng_at(rng: Tensor, offset: int) -> Tensor:
    """Returns the random state `offset` draws later, int32 [4]; the offset is added in 64 bits."""
    if offset == 0:
        return rng
    seed, count = rng.view(torch.int64).split(1)
    return torch.cat([seed, count + offset]).view(torch.int32)


def _offsets_of_calls(device: torch.device) -> Tensor:
    """Returns, for each quantize call of a layer, the numbers that are added to seed and offset, int64 [calls, 2]."""
    found = _OFFSETS_OF_CALLS.get(device)
    if found is None:
        with torch.inference_mode(False):
            offsets = torch.arange(0, OFFSETS, 2, dtype=torch.int64, device=device)
            found = torch.stack([torch.zeros_like(offsets), offsets], 1)
        # A tensor that was made during the capture of a CUDA graph belongs to that graph.
        if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            _OFFSETS_OF_CALLS[device] = found
    return found


_OFFSETS_OF_CALLS: dict[torch.device, Tensor] = {}


def _rng_take(rng: Tensor, count: int) -> Tensor:
    taken = rng.clone()
    rng.view(torch.int64).narrow(0, 1, 1).add_(count)
    wrote(rng)
    return taken


def _rng_take_of_calls(rng: Tensor, count: int) -> Tensor:
    words = rng.view(torch.int64)
    taken = words + _offsets_of_calls(rng.device)
    words.narrow(0, 1, 1).add_(count)
    wrote(rng)
    return taken.view(torch.int32)


def _rng_take_taped(rng: Tensor, count: int) -> Tensor:
    """Runs `_rng_take` for compiled code. A graph that an eager checkpoint recomputes takes the state from the tape."""
    entry = taped_call(None, "compiled")
    if entry is not None and entry.rng is not None:
        return entry.rng.clone()
    if backward_pass() != -1:
        raise UnsupportedError(
            "stochastic rounding in compiled code that a checkpoint recomputes: the recomputation would draw other "
            "bits than the forward; use diptych.torch.checkpoint"
        )
    taken = _rng_take(rng, count)
    tape_call(None, "compiled", None, None, taken)
    return taken


def _rng_take_fake(rng: Tensor, count: int) -> Tensor:
    require_saved("stochastic rounding")
    return torch.empty_like(rng)


# Taking a state is an op, because a compiled backward would recompute a plain clone after the state has advanced.
_rng_take_op = define(
    "rng_take", "(Tensor(a!) rng, int count) -> Tensor", _rng_take_taped, _rng_take_fake, buffers=True
)
SAVED.add(_rng_take_op)


def rng_take(rng: Tensor, count: int) -> Tensor:
    """Returns a copy of the state, and advances the state itself in place by `count` offsets. Eagerly the result has
    the state of each quantize call of a layer, int32 [calls, 4], so that programs need not compute them."""
    if direct(rng, watched=True):
        return _rng_take_of_calls(rng, count)
    if type(rng) is Tensor and not (torch.compiler.is_compiling() or jit_traces()):
        return _rng_take(rng, count)  # a transform of torch.func runs here; the caller writes the tape, not a graph
    return _rng_take_op(rng, count)
