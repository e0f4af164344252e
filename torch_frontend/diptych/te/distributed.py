"""`checkpoint`, with TransformerEngine's default."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diptych.torch as dt
from diptych.te import absent

__getattr__ = absent.attributes_of(__name__)


def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool = True, **kwargs: Any) -> Any:
    """diptych.torch's `checkpoint`, reentrant by default: weights get gradients only if an input requires one."""
    return dt.checkpoint(function, *args, use_reentrant=use_reentrant, **kwargs)
