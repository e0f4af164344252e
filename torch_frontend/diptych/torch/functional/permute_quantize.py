"""`moe_permute_and_quantize`: quantizes rows while it moves them to their experts.

One kernel reads each token once and writes both copies of its rows. As the other permutations, it is a function
eagerly, and in a graph one node forward and one backward.
"""

from __future__ import annotations

import dataclasses
from typing import Any, overload

from torch import Tensor

from diptych.common.errors import ArgumentError
from diptych.common.quantizers import Quantizer
from diptych.torch.functional import source as sources
from diptych.torch.functional.permute import RowMap, require_probs, require_row_map
from diptych.torch.functional.permute_op import FIRST_ALONE, Permute, call, move_back, moved_protos, permute
from diptych.torch.functional.quantize import quantize
from diptych.torch.graph.custom_op import CustomOp
from diptych.torch.graph.proto import TensorProto
from diptych.torch.primitives import permute as permute_ops
from diptych.torch.primitives.checks import require_high_precision, require_no_grad, require_quantizer, require_tensor
from diptych.torch.tensors.quantized import QuantizedTensor, from_buffers


@dataclasses.dataclass
class PermuteQuantize:
    """The arguments of one call. The fields after `quantizer` are those of `quantize`."""

    x: Tensor
    probs: Tensor | None
    row_id_map: Tensor
    row_source: Tensor
    quantizer: Quantizer
    amax: Tensor | None
    columnwise_amax: Tensor | None
    scale: Tensor | None
    rng: Tensor | None


def _forward(a: PermuteQuantize, needs: tuple[str, ...]) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    rows = sources.permuted(a.x, a.row_id_map, a.row_source)
    buffers = sources.quantize(rows, a.quantizer, a.amax, a.columnwise_amax, a.scale, a.rng)
    q = from_buffers(a.x, a.quantizer, buffers, (a.row_source.shape[0], a.x.shape[-1]))
    if a.probs is None:
        return (q,), []
    return (q, permute_ops.permute_probs(a.probs, a.row_id_map, a.row_source)), []


def _layout(a: PermuteQuantize, needs: tuple[str, ...]) -> tuple[TensorProto, ...]:
    rows, *probs = moved_protos(a.x, a.probs, a.row_source.shape[0], needs)
    return rows._replace(quantizer=a.quantizer), *probs


def _backward(
    a: PermuteQuantize, needs: tuple[str, ...], saved: list[Tensor], grads: list[Tensor | None]
) -> list[Tensor]:
    return move_back(a, needs, grads, a.row_id_map, a.row_id_map)


_permute_quantize = CustomOp(
    "diptych::moe_permute_quantize", PermuteQuantize, _forward, _layout, _backward,
    keeps=lambda a, needs: ("row_id_map",), remedy=FIRST_ALONE,
)  # fmt: skip


@overload
def moe_permute_and_quantize(
    inp: Tensor, row_map: RowMap, quantizer: Quantizer, *, amax: Tensor | None = None,
    columnwise_amax: Tensor | None = None, scale: Tensor | None = None, rng: Tensor | None = None,
) -> QuantizedTensor: ...  # fmt: skip
@overload
def moe_permute_and_quantize(
    inp: Tensor, row_map: RowMap, quantizer: Quantizer, *, probs: Tensor, amax: Tensor | None = None,
    columnwise_amax: Tensor | None = None, scale: Tensor | None = None, rng: Tensor | None = None,
) -> tuple[QuantizedTensor, Tensor]: ...  # fmt: skip


def moe_permute_and_quantize(
    inp: Tensor,
    row_map: RowMap,
    quantizer: Quantizer,
    *,
    probs: Tensor | None = None,
    amax: Tensor | None = None,
    columnwise_amax: Tensor | None = None,
    scale: Tensor | None = None,
    rng: Tensor | None = None,
) -> Any:
    """`quantize(moe_permute(inp, row_map)[0], quantizer)` in one pass: permuted rows are stored quantized only.

    **Arguments:** `inp`: [T, H] (or [..., H]) float32, bfloat16 or float16. `row_map`: one whose row_id_map and
    row_source agree, as those of `moe_map` do. `quantizer`, `amax`, `columnwise_amax`, `scale`, `rng`: as `quantize`,
    of the permuted rows. `probs`: as `moe_permute_with_probs`.

    **Returns:** a `QuantizedTensor` [rows, H], of which blocks of a columnwise copy run along permuted rows and absent
    rows are quantized zeros; with `probs` a pair, whose second is permuted_probs [rows]. The gradient of inp is each
    token's sum over the plain gradient's rows.

    **Raises:** as `quantize`; TypeError also for a row_map that is no RowMap, ValueError for unequal tokens,
    NotImplementedError for a second derivative.
    """
    op = "moe_permute_and_quantize"
    require_tensor(op, "inp", inp)
    require_quantizer(op, quantizer)
    if isinstance(inp, QuantizedTensor):
        raise ArgumentError(f"{op}: inp is quantized; moe_permute moves it as it is")
    require_high_precision(op, "inp", inp)
    require_row_map(op, inp, row_map)
    require_no_grad(f"{op} (its amaxes and scale)", amax, columnwise_amax, scale)
    if probs is not None:
        require_probs(op, "probs", probs, inp, row_map.row_id_map, None)
    row_id_map, _, _, row_source = row_map
    if quantizer.implementation() is not None:
        permuted = permute(Permute(inp, probs, row_id_map, row_source, False))
        given = {"amax": amax, "columnwise_amax": columnwise_amax, "scale": scale, "rng": rng}
        made = (quantize(permuted[0], quantizer, **given), *permuted[1:])
    else:
        given = (amax, columnwise_amax, scale, rng)
        a = PermuteQuantize(inp, probs, row_id_map, row_source, quantizer, *given)
        made = call(_permute_quantize, a, probs, row_id_map, row_source, *given)
    return made[0] if probs is None else made
