"""`LayerNorm` and `RMSNorm`: norms that stand alone, by the core's kernels, in high precision inside of regions too.

    LayerNorm   y = (x - mean(x)) / sqrt(var(x) + eps) * gamma + beta
    RMSNorm     y = x / sqrt(mean(x^2) + eps) * gamma

Statistics and products are computed in float32 from x as it is, and y is rounded once, to x's dtype: the bits are those
of the norms inside of `LayerNormLinear` and `LayerNormMLP`. A norm before a linear layer is cheaper there, because its
result need not be stored.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from diptych.common.errors import ArgumentError, ShapeError
from diptych.common.ops.norm import norm_options
from diptych.common.te_arguments import absorb, placed
from diptych.torch.functional import norm as norm_verbs
from diptych.torch.layers.checks import input_for
from diptych.torch.modules.fx import as_leaf
from diptych.torch.primitives.checks import describe


class _Norm(nn.Module):
    """The base of both norms. Attributes: `normalized_shape`, `eps`, `zero_centered_gamma`."""

    normalization: str
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        normalized_shape: int | Iterable[int],
        eps: float = 1e-5,
        *,
        zero_centered_gamma: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        params_dtype: torch.dtype | None = None,
        **others: Any,
    ) -> None:
        op = type(self).__name__
        absorb(op, others)
        where = placed(op, device, dtype, params_dtype)
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        if not shape or any([isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in shape]):
            raise ArgumentError(
                f"{op}: normalized_shape must be an int or ints of at least 1, got {normalized_shape!r}"
            )
        super().__init__()
        self._options = norm_options(op, self.normalization, eps, zero_centered_gamma)
        self.normalized_shape, self.eps, self.zero_centered_gamma = shape, eps, zero_centered_gamma
        self.weight = nn.Parameter(torch.empty(shape, **where))
        self.bias = nn.Parameter(torch.empty(shape, **where)) if self.normalization == "LayerNorm" else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Makes the norm scale by 1 and add 0."""
        nn.init.constant_(self.weight, 0.0 if self.zero_centered_gamma else 1.0)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        """Returns the norm of `input` [..., *normalized_shape], in its dtype, or in that of `torch.amp.autocast`.

        **Raises** TypeError for other dtypes, ShapeError for another shape, NotImplementedError for a second
        derivative.
        """
        op, inner = type(self).__name__, len(self.normalized_shape)
        if not isinstance(input, Tensor):
            return as_leaf(self, input)
        if tuple(input.shape[-inner:]) != self.normalized_shape:
            extents = ", ".join(map(str, self.normalized_shape))
            raise ShapeError(f"{op}: input must be [..., {extents}], as normalized_shape says, got {describe(input)}")
        gamma, beta = self.weight, self.bias
        if inner > 1:
            rows = input.flatten(input.dim() - inner)
            gamma, beta = gamma.flatten(), None if beta is None else beta.flatten()
            y = norm_verbs.layernorm(input_for(op, rows, gamma, beta), gamma, beta, self._options)
            return y.view(input.shape)
        return norm_verbs.layernorm(input_for(op, input, gamma, beta), gamma, beta, self._options)

    def extra_repr(self) -> str:
        shape = self.normalized_shape[0] if len(self.normalized_shape) == 1 else self.normalized_shape
        centered = ", zero-centered" if self.zero_centered_gamma else ""
        return f"{shape}, eps={self.eps:g}{centered}"


class LayerNorm(_Norm):
    """Layer normalization over the last axes, with a scale and a shift.

    **Arguments:** `normalized_shape`: the extents of these axes, an int or ints. `eps`: added to the variance.
    `zero_centered_gamma`: `weight` holds gamma - 1, and starts at 0. `device`, `dtype`: of the parameters;
    `params_dtype`: another name of `dtype`. TransformerEngine's `sequence_parallel`, `sm_margin` and `hidden_size` are
    accepted with their defaults.

    Parameters: `weight`, `bias`, both of `normalized_shape`, as nn.LayerNorm has them.

    **Raises:** TypeError and ValueError for arguments of other kinds and values; see `forward`.
    """

    normalization = "LayerNorm"


class RMSNorm(_Norm):
    """Root mean square normalization over the last axes, with a scale.

    **Arguments:** as `LayerNorm`; `eps` is added to the mean square. Its default is 1e-5, where nn.RMSNorm takes the
    dtype's epsilon. Parameter: `weight`.

    **Raises:** as `LayerNorm`.
    """

    normalization = "RMSNorm"
