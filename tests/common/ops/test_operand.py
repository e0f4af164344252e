"""Arguments as messages show them."""

from __future__ import annotations

import pytest

from diptych.common.errors import DTypeError
from diptych.common.ops.operand import Operand, require_dtype


def test_a_message_names_the_device_where_it_is_known():
    here, somewhere = Operand("x", "int8", (2, 3), "cuda:1"), Operand("x", "int8", (2, 3))
    assert str(here) == "int8[2, 3] on cuda:1" and str(somewhere) == "int8[2, 3]"
    with pytest.raises(DTypeError, match=r"amax: x must be float32 or float16, got int8\[2, 3\] on cuda:1"):
        require_dtype("amax", here, "float32", "float16")
