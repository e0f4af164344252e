"""The check that copies of a tensor that is held quantized are those that a recipe asks a layer to multiply."""

from __future__ import annotations

from diptych.common.formats import FORMATS
from diptych.common.quantizers import RHT, RHT_SIGNS, ROW_AMAX, Quantizer


def require_same(what: str, held: Quantizer, asked: Quantizer, rowwise: bool, columnwise: bool, remedy: str) -> None:
    """**Raises** ValueError where copies that are held are of another format than those that a recipe asks for, or of
    another kind of amax (of a rowwise copy) or Hadamard transform (of a columnwise one).

    `what`, `remedy`: the beginning and the end of the message.
    """
    # By ids: Dynamo knows a quantizer's spec, and not its format.
    is_held, wanted = FORMATS[held.spec.format_id].name, FORMATS[asked.spec.format_id].name
    if is_held != wanted:
        raise ValueError(f"{what} is held as {is_held}, and the recipe asks for {wanted}; {remedy}")
    counts = ROW_AMAX * rowwise | (RHT | RHT_SIGNS) * columnwise
    if (held.spec.flags ^ asked.spec.flags) & counts:
        raise ValueError(f"{what} is held by {held}, and the recipe asks for {asked}; {remedy}")
