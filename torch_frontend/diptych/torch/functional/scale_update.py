"""The verb `scale_update`: delayed scales from histories of amaxes."""

from __future__ import annotations

from torch import Tensor

from diptych.torch.primitives import scale_update as scale_update_ops
from diptych.torch.primitives.checks import (
    require_tensor,
)


def scale_update(
    history: Tensor,
    scale: Tensor,
    *,
    reduced: Tensor | None = None,
    amax: Tensor | None = None,
    fp8_max: float = 448.0,
    margin: int = 0,
    most_recent: bool = False,
) -> None:
    """Delayed scaling's update (NUMERICS 2) of n tensors that share an element, in place.

    **Arguments:** `history`: contiguous float32 [n, L] (or [L]), L >= 1; entry 0 holds the amax since the last update.
    `scale`: contiguous float32 [n]. `reduced`: [n] amaxes after a reduction over a group, used instead of entry 0 where
    not 0. `amax`: [n] chosen by an algorithm of the caller's own, used where there was an amax at all. `fp8_max`: the
    element's largest value. `margin`: the scale is divided by 2^margin. `most_recent`: take the latest amax, not the
    largest of the history.

    A history of one entry holds 0 after each update.

    **Raises:** TypeError for other dtypes, ValueError for other shapes, mixed devices, or `most_recent` with `amax`.
    """
    for name, t in (("history", history), ("scale", scale), ("reduced", reduced), ("amax", amax)):
        if t is not None or name in ("history", "scale"):
            require_tensor("scale_update", name, t)
    scale_update_ops.scale_update(history, scale, reduced, amax, float(fp8_max), margin, most_recent)
