"""`ParallelStyle`s for `torch.distributed.tensor.parallel.parallelize_module`, which cut whole modules over ranks.

A style makes the module's parameters DTensors on the tensor-parallel mesh, and makes the module equal to one that was
created with a `tp_group` (`modules/tensor_parallel.py`), so that both ways compute the same. Layouts at the module's
boundary determine whether activations are cut along tokens: the layer then gathers and scatters them itself, in the
recipe's format.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.parallel import SequenceParallel as _SequenceParallel
from torch.distributed.tensor.placement_types import Placement

from diptych.common.errors import ArgumentError, ShapeError, UnsupportedError
from diptych.common.layer_options import COLUMN, ROW, TensorParallel
from diptych.torch.modules.base import QuantizedModule
from diptych.torch.modules.layernorm_linear import LayerNormLinear
from diptych.torch.modules.layernorm_mlp import LayerNormMLP
from diptych.torch.modules.linear import Linear
from diptych.torch.modules.tensor_parallel import ParameterCut, TensorParallelModule
from diptych.torch.private.sharding import root_mesh, strided_shard
from diptych.torch.tensors.quantized import QuantizedTensorBase

FEATURES = Shard(-1)


class _Style(ParallelStyle):
    """The base of the styles that cut linear layers. `inputs`, `outputs`: the layouts of activations outside of the
    module."""

    kinds: tuple[type[TensorParallelModule], ...] = ()
    modes: Mapping[str, str] = {}

    def __init__(self, inputs: Placement, outputs: Placement, use_local_output: bool) -> None:
        super().__init__()
        self.inputs, self.outputs, self.use_local_output = inputs, outputs, use_local_output

    def __repr__(self) -> str:
        return f"{type(self).__name__}(input_layouts={self.inputs}, output_layouts={self.outputs})"

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        op = f"parallel.{type(self).__name__}"
        if not isinstance(module, self.kinds):
            remedy = "" if isinstance(module, QuantizedModule) else "; torch's own styles cut torch's modules"
            names = ", ".join([kind.__name__ for kind in self.kinds])
            raise ArgumentError(f"{op} cuts {names}, got {type(module).__name__}{remedy}")
        if device_mesh.ndim != 1:
            raise ArgumentError(f"{op}: the mesh has {device_mesh.ndim} dimensions; give the tensor-parallel one alone")
        if module.tp_size > 1:
            raise ArgumentError(f"{op}: {type(module).__name__} is cut already over {module.tp_size} ranks")
        _require_plain(op, module)
        shards = [layout.dim for layout in (self.inputs, self.outputs) if isinstance(layout, Shard)]
        sequence = [dim for dim in shards if dim >= 0]
        module.become_cut(TensorParallel(device_mesh.get_group(), 1, bool(sequence), self.modes))
        cuts = module.cuts()
        for name, p in list(module._parameters.items()):
            if p is not None:
                cut = cuts.get(name)
                placed = _distributed(p.detach(), device_mesh, cut, self.src_data_rank)
                module.register_parameter(name, nn.Parameter(placed, p.requires_grad))
        for layer in module._modes:
            module._mark(layer)
        if any([cut.parts > 1 for cut in cuts.values()]):
            _warn_of_strides(op, device_mesh)
        swaps = bool(sequence) and sequence[0] == 1
        module.register_forward_pre_hook(_Before(self.inputs, device_mesh, swaps), with_kwargs=True)
        module.register_forward_hook(_After(self.outputs, device_mesh, swaps, self.use_local_output))
        return module


class ColwiseParallel(_Style):
    """Cuts the features of a `Linear`'s or `LayerNormLinear`'s result, like their `parallel_mode="column"`.

    **Arguments:** `input_layouts`: with `Replicate()`, the default, each rank gives the whole input; with `Shard(0)` or
    `Shard(1)` each rank gives its tokens, cut along this dimension, which the layer gathers quantized.
    `output_layouts`: `Shard(-1)`, the rank's features, is the only layout. `use_local_output`: False returns a DTensor.

    A plain input is this rank's part; a DTensor must be placed as `input_layouts` says.

    **Raises** ValueError for other layouts. Applying the style **raises** ArgumentError for other modules or meshes and
    for modules that are cut already, ShapeError if ranks cannot share the extents, UnsupportedError for weights that
    are held quantized and for `fuse_wgrad_accumulation` and `delay_wgrad_compute`.
    """

    kinds = (Linear, LayerNormLinear)
    modes: Mapping[str, str] = {"": COLUMN}

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        _require_layout("ColwiseParallel", "output_layouts", output_layouts, (FEATURES,))
        inputs = _outside("ColwiseParallel", "input_layouts", input_layouts)
        super().__init__(inputs, FEATURES, use_local_output)


class RowwiseParallel(_Style):
    """Cuts the features of a `Linear`'s input, like its `parallel_mode="row"`.

    **Arguments:** `input_layouts`: `Shard(-1)`, the rank's features, is the only layout. `output_layouts`: with
    `Replicate()`, the default, each rank gets the whole result; with `Shard(0)` or `Shard(1)` it gets its tokens, cut
    along this dimension. `use_local_output`: False returns a DTensor.

    **Raises** the errors of `ColwiseParallel`.
    """

    kinds = (Linear,)
    modes: Mapping[str, str] = {"": ROW}

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        _require_layout("RowwiseParallel", "input_layouts", input_layouts, (FEATURES,))
        outputs = _outside("RowwiseParallel", "output_layouts", output_layouts)
        super().__init__(FEATURES, outputs, use_local_output)


class PairwiseParallel(_Style):
    """Cuts a `LayerNormMLP`, fc1 by columns and fc2 by rows, like its `set_parallel_mode=True`.

    **Arguments:** `layouts`: with `Replicate()`, the default, each rank gives the whole input and gets the whole
    result; with `Shard(0)` or `Shard(1)` input and result hold the rank's tokens, cut along this dimension.
    `use_local_output`: False returns a DTensor.

    **Raises** the errors of `ColwiseParallel`.
    """

    kinds = (LayerNormMLP,)
    modes: Mapping[str, str] = {"fc1": COLUMN, "fc2": ROW}

    def __init__(self, *, layouts: Placement | None = None, use_local_output: bool = True) -> None:
        outside = _outside("PairwiseParallel", "layouts", layouts)
        super().__init__(outside, outside, use_local_output)

    def __repr__(self) -> str:
        return f"PairwiseParallel(layouts={self.inputs})"


class SequenceParallel(_SequenceParallel):
    """Runs a torch module that handles each token by itself (norms, dropout) on this rank's tokens.

    torch's style of this name does the work: parameters become replicated DTensors, and their gradients are summed over
    the ranks. Unlike torch's style it gives every rank the parameters of the first one, and returns a plain tensor.

    **Arguments:** `sequence_dim`: the dimension along which tokens are cut. `use_local_output`: False returns a
    DTensor.

    Applying it to a quantized module **raises** ArgumentError: `ColwiseParallel`, `RowwiseParallel` and
    `PairwiseParallel` have layouts for tokens that are cut.
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = True) -> None:
        super().__init__(sequence_dim=sequence_dim, use_local_output=use_local_output)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if any(isinstance(m, QuantizedModule) for m in module.modules()):
            raise ArgumentError(
                f"parallel.SequenceParallel runs torch's norms and dropout, got {type(module).__name__} with quantized "
                "layers; give these a style with layouts Shard(0) or Shard(1)"
            )
        return super()._apply(module, device_mesh)

    def _replicate_module_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        for key, p in list(module._parameters.items()):
            if p is not None:
                placed = distribute_tensor(p.detach(), device_mesh, [Replicate()], src_data_rank=self.src_data_rank)
                module.register_parameter(key, nn.Parameter(placed, p.requires_grad))


# --- parameters ------------------------------------------------------------------------------------------------------


def _distributed(whole: Tensor, mesh: DeviceMesh, cut: ParameterCut | None, source: int | None) -> DTensor:
    """Returns the DTensor of a whole parameter. `source`: the rank of the mesh whose values all ranks take; None: each
    its own."""
    if cut is None or cut.parts == 1:
        placement = Replicate() if cut is None else Shard(cut.dim)
        return distribute_tensor(whole, mesh, [placement], src_data_rank=source)
    stacked = whole.unflatten(0, (cut.parts, -1))
    part = distribute_tensor(stacked, mesh, [Shard(1)], src_data_rank=source).to_local().flatten(0, 1)
    placements = [strided_shard(cut.parts)]
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def _warn_of_strides(op: str, mesh: DeviceMesh) -> None:
    if root_mesh(mesh).ndim > 1:
        warnings.warn(
            f"{op}: fc1 stacks gate and value, each of which is cut. Once fully_shard cuts it too, torch's "
            "full_tensor() returns its rows in another order; diptych.torch.parallel.save, load and export do not",
            stacklevel=4,
        )


def _require_plain(op: str, module: Any) -> None:
    """**Raises** UnsupportedError if a DTensor cannot hold the module's gradients or weights."""
    kind = type(module).__name__
    if module._weight_gradients is not None:
        raise UnsupportedError(
            f"{op}: {kind} has fuse_wgrad_accumulation or delay_wgrad_compute, which fill plain tensors; make it with "
            "tp_group instead"
        )
    for name, p in module.named_parameters(recurse=False):
        if isinstance(p, QuantizedTensorBase):
            raise UnsupportedError(
                f"{op}: {kind}.{name} is held quantized, and cut layers hold no such weights; make the module outside "
                "of quantized_model_init"
            )
        if isinstance(p, DTensor):
            raise ArgumentError(f"{op}: {kind}.{name} is a DTensor already; apply styles before fully_shard")


# --- activations -----------------------------------------------------------------------------------------------------


def _outside(op: str, argument: str, layout: Placement | None) -> Placement:
    """Returns the layout of activations outside of a pair of layers."""
    layout = Replicate() if layout is None else layout
    _require_layout(op, argument, layout, (Replicate(), Shard(0), Shard(1)))
    return layout


def _require_layout(op: str, argument: str, layout: Placement | None, allowed: tuple[Placement, ...]) -> None:
    if layout is not None and layout not in allowed:
        names = " or ".join([str(one) for one in allowed])
        raise ValueError(f"parallel.{op}: {argument} must be {names}, got {layout!r}")


class _Before:
    """A hook that passes on the input's local tensor, with tokens along dimension 0."""

    def __init__(self, layout: Placement, mesh: DeviceMesh, swaps: bool) -> None:
        self.layout, self.mesh, self.swaps = layout, mesh, swaps

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args = (self._taken(module, args[0]), *args[1:]) if args else args
        return args, {k: self._taken(module, v) if k in ("input", "inp") else v for k, v in kwargs.items()}

    def _taken(self, module: nn.Module, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if isinstance(x, DTensor):
            expected = Shard(x.dim() - 1) if self.layout == FEATURES else self.layout
            if x.device_mesh != self.mesh or x.placements not in ((self.layout,), (expected,)):
                raise ArgumentError(
                    f"{type(module).__name__}: the input is placed {x.placements} on {x.device_mesh}, and its style "
                    f"expects {self.layout} on {self.mesh}; redistribute it, or say so by the style's layouts"
                )
            if isinstance(self.layout, Shard) and x.shape[self.layout.dim] % self.mesh.size():
                raise ShapeError(
                    f"{type(module).__name__}: dimension {self.layout.dim} of the input {list(x.shape)} is no multiple "
                    f"of the {self.mesh.size()} tensor-parallel ranks; pad it"
                )
            x = x.to_local(grad_placements=x.placements)
        return _swapped(type(module).__name__, x) if self.swaps else x


class _After:
    """A hook that returns the result with tokens along the dimension that the layouts name."""

    def __init__(self, layout: Placement, mesh: DeviceMesh, swaps: bool, use_local_output: bool) -> None:
        self.layout, self.mesh, self.swaps, self.use_local_output = layout, mesh, swaps, use_local_output

    def __call__(self, module: nn.Module, args: Any, result: Any) -> Any:
        first, *rest = result if isinstance(result, tuple) else (result,)
        if self.swaps:
            first, *rest = [t.transpose(0, 1) if t.dim() > 2 else t for t in (first, *rest)]
        if not self.use_local_output:
            placement = Shard(first.dim() - 1) if self.layout == FEATURES else self.layout
            first = DTensor.from_local(first, self.mesh, [placement], run_check=False)
        return (first, *rest) if isinstance(result, tuple) else first


def _swapped(op: str, x: Tensor) -> Tensor:
    if x.dim() < 3:
        raise ShapeError(
            f"{op}: with a layout Shard(1) the input must be [batch, tokens, features], got {list(x.shape)}"
        )
    return x.transpose(0, 1)
