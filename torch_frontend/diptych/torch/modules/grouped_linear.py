"""`GroupedLinear`: a linear layer for each group of rows, such as the experts of a layer; `layers/grouped_linear.py`
has the layer."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diptych.common.errors import ArgumentError, DTypeError, ShapeError, UnsupportedError
from diptych.common.layer_options import Originals, WeightGradientOptions
from diptych.common.layers.groups import HIGH_PRECISION
from diptych.common.recipes import Recipe
from diptych.common.te_arguments import absorb, module_arguments, placed
from diptych.torch.functional.permute import RowMap, moe_permute, require_row_map
from diptych.torch.functional.permute_op import as_int32, host_numbers
from diptych.torch.layers.grouped_linear import grouped_linear as grouped_linear
from diptych.torch.layers.grouped_linear import grouped_linear_with
from diptych.torch.layers.options import Options
from diptych.torch.modules.base import QuantizedModule
from diptych.torch.modules.fx import as_leaf
from diptych.torch.modules.model_init import initial_weight, initialize
from diptych.torch.primitives.checks import describe
from diptych.torch.state.autocast import STATE
from diptych.torch.tensors.quantized import QuantizedTensorBase, high_precision


class GroupedLinear(QuantizedModule):
    """`num_gemms` linear layers, one for each group of consecutive rows; they quantize inside `autocast`.

    **Arguments:** `num_gemms`: groups, G. `in_features`, `out_features`, `bias`, `device`, `dtype`, `recipe`, `name`,
    `fuse_wgrad_accumulation`, `delay_wgrad_compute`, `save_original_input`, `save_original_weight`, `params_dtype`,
    `init_method`, `return_bias`, arguments about parallelism: as `Linear`; `init_method` is called with each weight,
    [N, K].

    Parameters: `weight` [G, N, K], each of G initialized as nn.Linear's, and `bias` [G, N] or None. A state dict that
    has `weight0`, `bias0`, ... as TransformerEngine's GroupedLinear has them is loaded too: they are stacked. The
    module kind of roles is "grouped_linear". The input is quantized whole; each weight has scales of its own, except
    under delayed scaling: there is one state "weight", whose scale all of them share and whose amax is over all.

    `weight0`, `weight1`, ..., `bias0`, ... show the parts of each of G as leaf tensors that share the memory of the
    stack, of its `grad` and of its `main_grad`; each access makes them anew. Optimizers get the stacks.

    Inside of `quantized_model_init` the weight is held as a `QuantizedStack`, each of G with scales of its own.

    **Raises:** TypeError if `recipe` is not a recipe, ValueError for sizes below 1; see `forward` for the rest.
    """

    module_kind = "grouped_linear"
    bias: Tensor | None

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        recipe: Recipe | None = None,
        name: str | None = "",
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        save_original_weight: bool = False,
        params_dtype: torch.dtype | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        return_bias: bool = False,
        **others: Any,
    ) -> None:
        given = module_arguments(
            "GroupedLinear", others, recipe, name, placed("GroupedLinear", device, dtype, params_dtype),
            originals=Originals(save_original_input, save_original_weight),
            weight_gradients=WeightGradientOptions(fuse_wgrad_accumulation, delay_wgrad_compute),
            init_method=init_method, return_bias=return_bias,
        )  # fmt: skip
        for arg, n in (("num_gemms", num_gemms), ("in_features", in_features), ("out_features", out_features)):
            if not isinstance(n, int) or n < 1:
                raise ValueError(f"GroupedLinear: {arg} must be an int of at least 1, got {n!r}")
        super().__init__()
        self._take(given)
        self.num_gemms, self.in_features, self.out_features = num_gemms, in_features, out_features
        self.weight = nn.Parameter(torch.empty(num_gemms, out_features, in_features, **given.placed))
        if bias:
            self.bias = nn.Parameter(torch.empty(num_gemms, out_features, **given.placed))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()
        self.weight = initial_weight(self.weight, recipe, self.module_kind, self.name)
        self._make_initial_states()

    def __getattr__(self, name: str) -> Any:
        part = _PART.fullmatch(name) if name[-1:].isdigit() else None  # a regular expression costs more
        stack = self._parameters.get(part[1]) if part else None
        if part is None or stack is None or int(part[2]) >= self.num_gemms:
            return super().__getattr__(name)
        return _part(stack, int(part[2]))

    def __setattr__(self, name: str, value: Any) -> None:
        if name[-1:].isdigit() and _PART.fullmatch(name):
            raise UnsupportedError(
                f"GroupedLinear.{name} cannot be assigned: the {name.rstrip('0123456789')}s of all groups are one "
                f"parameter; write into it, `with torch.no_grad(): layer.{name}.copy_(value)`"
            )
        super().__setattr__(name, value)

    def reset_parameters(self) -> None:
        """Makes each of the G layers anew as nn.Linear, or by the `init_method`, which leaves biases at zero."""
        if self.init_method is not None:
            for g in range(self.num_gemms):
                initialize(self.weight[g], None if self.bias is None else self.bias[g], self.init_method)
            return
        bound = 1 / math.sqrt(self.in_features)
        for p in (self.weight, self.bias):
            if p is not None:
                nn.init.uniform_(p, -bound, bound)

    def forward(
        self,
        inp: Tensor,
        m_splits: Tensor | Sequence[int] | None = None,
        is_first_microbatch: bool | None = None,
        *,
        offsets: Tensor | None = None,
        row_map: RowMap | None = None,
        align: int = 1,
        out: None = None,
        dgrad_out: None = None,
    ) -> Any:
        """inp[r] @ weight[g].T + bias[g] for the rows r of each group g, by the region's recipe.

        **Arguments:** `inp`: [..., K] with R rows. `m_splits`: rows of each group, which follow one another from row 0
        on: int32 or int64 [G] on the device, which the host does not wait for; or ints, which are moved there, and on
        which compiled code is specialized. Ints and an eager CPU tensor need no `align`: their multiples are read from
        them. Or instead `offsets`: int32 [G + 1], group g being rows offsets[g] <= r < offsets[g + 1], such as
        `RowMap.expert_offsets`. Or instead `row_map`: of `moe_map`. `inp` is then in token order, [T, K] (or [..., K]),
        its rows are quantized as they move to their experts, which are the groups, and its gradient is each token's
        sum; the bits are those of `moe_permute` before this layer. `align`: a promise that every group begins at a
        multiple of it; see `grouped_linear`, also for rows in no group. `is_first_microbatch`: as
        `Linear`: True quantizes the weights and keeps the copies, False uses those kept, None quantizes and keeps
        nothing. `out`, `dgrad_out`: None; results are new tensors.

        **Returns:** [..., N], with a `row_map` [rows, N] by expert; rows in no group are zeros. With `return_bias`
        that without the bias, and the bias [G, N].

        **Raises:** as `grouped_linear`; TypeError and ValueError for other splits, ValueError for a later microbatch
        without a first one; CheckpointError if loaded states are another recipe's.
        """
        absorb("GroupedLinear", {"out": out, "dgrad_out": dgrad_out}, of="GroupedLinear.forward")
        groups: Any = {"offsets": offsets, "row_map": row_map, "align": align}
        if not isinstance(inp, Tensor):
            given = {k: v for k, v in groups.items() if k != "align" or v != 1}
            return as_leaf(self, inp, m_splits, is_first_microbatch, **given)
        y = self._run(inp, m_splits, is_first_microbatch, **groups)
        return (y, self.bias) if self.return_bias else y

    def _run(
        self,
        inp: Tensor,
        m_splits: Tensor | Sequence[int] | None,
        is_first_microbatch: bool | None,
        *,
        offsets: Tensor | None,
        row_map: RowMap | None,
        align: int,
    ) -> Tensor:
        bias = None if self.return_bias else self.bias
        if torch.compiler.is_compiling() and (outside := self._eager_only(self.weight)) is not None:
            groups = {"offsets": offsets, "row_map": row_map, "align": align}
            return outside.run(self._run, inp, m_splits, is_first_microbatch, **groups)
        if [m_splits is None, offsets is None, row_map is None].count(False) != 1:
            raise ValueError("GroupedLinear: give the groups once, as m_splits, as offsets or by a row_map")
        sizes = None
        if m_splits is not None:
            offsets = _offsets_of(m_splits, self.num_gemms, inp, align)
            sizes = host_numbers(m_splits)
        recipe = self._active_recipe()
        if recipe is None:
            self._note_plain("")
            x = high_precision("grouped_linear", inp)
            if row_map is not None:
                require_row_map("GroupedLinear", x, row_map)
                x, offsets = moe_permute(x, row_map)[0], row_map.expert_offsets
            assert offsets is not None
            elsewhere = None if self._weight_gradients is None else self._weight_gradients.of(self.weight)
            plain = functools.partial(_in_high_precision, offsets, elsewhere)
            if STATE.calibrating is not None:
                return self._calibrate(x, self.weight, bias, "", STATE.calibrating, plain)
            return plain(x, self.weight, bias)
        originals = Originals(self.save_original_input, self.save_original_weight)
        options = self._options_for(recipe, inp, self.weight, "", originals, is_first_microbatch)
        return grouped_linear_with(inp, self.weight, bias, offsets, align, recipe, options, row_map, sizes)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        for name, p in (("weight", self.weight), ("bias", self.bias)):
            for part in ("", "_scale_inv", "_scale"):  # the suffixes in published FP8 checkpoints
                _stack(state_dict, prefix + name, part, self.num_gemms if p is not None else 0)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        sizes = f"{self.num_gemms}, {self.in_features}, {self.out_features}"
        return f"{sizes}, bias={self.bias is not None}{self._repr_recipe()}"


_PART = re.compile(r"(weight|bias)(0|[1-9][0-9]*)")  # the names by which the parts of stacks are shown


def _part(stack: Tensor, g: int) -> Tensor:
    """Returns part g of a stack, of its gradient and of its `main_grad`, as a leaf that shares their memory."""
    part = stack.detach()[g].requires_grad_(stack.requires_grad)
    if stack.grad is not None:
        part.grad = stack.grad[g]
    main_grad = getattr(stack, "main_grad", None)
    if main_grad is not None:
        part.main_grad = main_grad[g]  # type: ignore[attr-defined]
    return part


def _in_high_precision(offsets: Tensor, weight_grad: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    options = Options(GroupedLinear.module_kind, weight_grad=weight_grad)
    return grouped_linear_with(x, weight, bias, offsets, 1, HIGH_PRECISION, options)


def _stack(state_dict: Any, key: str, part: str, count: int) -> None:
    """Exchanges the `count` tensors of a state dict whose keys have a number before `part` for one of them all. Where
    they are not of one shape, or some are missing, they stay, for torch to name what it does not find or know."""
    names = [f"{key}{g}{part}" for g in range(count)]
    parts = [state_dict.get(name) for name in names]
    plain = [isinstance(t, Tensor) and not isinstance(t, QuantizedTensorBase) for t in parts]
    whole = count > 0 and key + part not in state_dict and all(plain)
    if whole and len({(t.shape, t.dtype) for t in parts}) == 1:
        state_dict[key + part] = torch.stack(parts)
        for name in names:
            del state_dict[name]


def _offsets_of(m_splits: Any, groups: int, inp: Tensor, align: int) -> Tensor:
    """Returns the offsets of groups of these sizes, int32 [groups + 1]: where each begins and the last one ends."""
    op = "GroupedLinear"
    if isinstance(m_splits, Tensor):
        if m_splits.dtype not in (torch.int32, torch.int64):
            raise DTypeError(f"{op}: m_splits must be int32 or int64, got {describe(m_splits)}")
        if m_splits.dim() != 1:
            raise ShapeError(f"{op}: m_splits must be [{groups}], got {describe(m_splits)}")
        counts = m_splits if m_splits.device == inp.device else m_splits.to(inp.device, non_blocking=True)
    elif isinstance(m_splits, (list, tuple)):
        total = 0
        for n in m_splits:
            if not isinstance(n, int) or n < 0 or n % align != 0:
                raise ValueError(f"{op}: m_splits must be ints of 0 or more, in multiples of align={align}, got {n!r}")
            total += n
        rows = math.prod(inp.shape[:-1])
        if total > rows:
            raise ValueError(f"{op}: m_splits add up to {total}, and inp has {rows} rows")
        counts = as_int32(m_splits, inp.device)
    else:
        raise ArgumentError(f"{op}: m_splits must be a tensor or a sequence of ints, got {type(m_splits).__name__}")
    if counts.shape[0] != groups:
        raise ShapeError(f"{op}: m_splits must hold {groups} sizes, one for each group, got {counts.shape[0]}")
    return F.pad(counts.cumsum(0).clamp(-1, 2**31 - 1), (1, 0)).to(torch.int32)
