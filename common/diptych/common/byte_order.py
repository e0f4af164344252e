"""NumPy names a dtype alike in either byte order: whatever reads the name has to ask for the order too."""

from __future__ import annotations

from typing import Any

from diptych.common.errors import DTypeError


def check_byte_order(op: str, arg: str, dtype: Any) -> None:
    """**Raises** DTypeError for a NumPy dtype of the byte order that is not this machine's."""
    if not dtype.isnative:
        order = "big" if dtype.str.startswith(">") else "little"
        raise DTypeError(
            f"{op}: {arg} is {order}-endian ({dtype.str}), the other byte order than this machine's; "
            "use x.astype(x.dtype.newbyteorder('='))"
        )
