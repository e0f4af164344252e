"""`make_graphed_callables`, with TransformerEngine's order of arguments."""

from __future__ import annotations

from typing import Any

import diptych.torch as dt
from diptych.common.te_arguments import either
from diptych.te import absent
from diptych.te.arguments import bound, signature

__getattr__ = absent.attributes_of(__name__)


def make_graphed_callables(*args: Any, **kwargs: Any) -> Any:
    """diptych.torch's `make_graphed_callables`, which is in high precision unless `enabled=True`, as
    TransformerEngine's is. **Raises** as that."""
    name = "make_graphed_callables"
    given = bound(name, args, kwargs)
    enabled = either(name, "enabled", given.pop("enabled", None), "fp8_enabled", given.pop("fp8_enabled", None))
    return dt.make_graphed_callables(given.pop("modules"), given.pop("sample_args"), enabled=bool(enabled), **given)


make_graphed_callables.__signature__ = signature("make_graphed_callables")  # type: ignore[attr-defined]
