"""The check that the copies of a held tensor are those that a recipe requires."""

from __future__ import annotations

from diptych.common.formats import FORMATS
from diptych.common.quantizers import FROM_ROWS, RHT, RHT_SIGNS, ROW_AMAX, Quantizer


def require_same(what: str, held: Quantizer, asked: Quantizer, rowwise: bool, columnwise: bool, remedy: str) -> None:
    """**Raises** ValueError if held copies and the copies that a recipe requires differ in their format, the rowwise
    copies in their kind of amax, or the columnwise copies in their Hadamard transform or origin.

    `what`, `remedy`: the beginning and the end of the message.
    """
    # Formats are compared by id: Dynamo can read a quantizer's spec, but not its format.
    is_held, wanted = FORMATS[held.spec.format_id].name, FORMATS[asked.spec.format_id].name
    if is_held != wanted:
        raise ValueError(f"{what} is held as {is_held}, and the recipe asks for {wanted}; {remedy}")
    counts = ROW_AMAX * rowwise | (RHT | RHT_SIGNS | FROM_ROWS) * columnwise
    if (held.spec.flags ^ asked.spec.flags) & counts:
        raise ValueError(f"{what} is held by {held.described()}, and the recipe asks for {asked.described()}; {remedy}")
