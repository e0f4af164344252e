"""A check of byte order: NumPy gives a dtype the same name in both orders, so checking the name is not enough."""

from __future__ import annotations

from typing import Any

from diptych.common.errors import DTypeError


def check_byte_order(op: str, arg: str, dtype: Any) -> None:
    """**Raises** DTypeError for a NumPy dtype whose byte order is not this machine's."""
    if not dtype.isnative:
        order = "big" if dtype.str.startswith(">") else "little"
        raise DTypeError(
            f"{op}: {arg} is {order}-endian ({dtype.str}), the other byte order than this machine's; "
            "use x.astype(x.dtype.newbyteorder('='))"
        )
