"""`TensorParallelModule`: the part of modules that says how their linear layers are cut over a tensor-parallel group.

`layers/tensor_parallel.py` has what a cut layer computes. A module is cut by its constructor's arguments, or later by a
`ParallelStyle` (`distributed/styles.py`), which makes its parameters DTensors. Arguments and attributes are named as in
Megatron-LM and TransformerEngine: sizes that a constructor takes are those of the whole layer, and the module holds
this rank's part. Parameters are drawn whole, with torch's generator, and cut: ranks that seed it alike hold the parts
of one layer, ranks of other dimensions of a mesh included.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from diptych.common.errors import ArgumentError, RankMismatchError, ShapeError, UnsupportedError
from diptych.common.layer_options import COLUMN, TensorParallel
from diptych.common.layers.groups import HIGH_PRECISION
from diptych.common.layers.plan import LinearPlan
from diptych.common.recipes import Recipe
from diptych.torch.graph.guards import before_each_call
from diptych.torch.layers.options import schedule
from diptych.torch.layers.tensor_parallel import Cut
from diptych.torch.modules.agreement import described, require_alike
from diptych.torch.modules.model_init import initial_recipe, initialize
from diptych.torch.primitives.register import traced_local
from diptych.torch.private.graphs import fake_mode
from diptych.torch.state.autocast import amax_group
from diptych.torch.state.checkpoint import aside


class _Held:
    """A process group, which a copy of a module shares and a pickled module does not have."""

    def __init__(self, group: Any = None) -> None:
        self.group = group

    def __deepcopy__(self, memo: dict[int, Any]) -> _Held:
        return self

    def __reduce__(self) -> Any:
        return _Held, ()


class ParameterCut(NamedTuple):
    """A parameter's dimension that is cut, and how many parts it stacks there, each of which is cut."""

    dim: int
    parts: int


def _dimensions(t: Any) -> list[tuple[list[int], int, int | None]]:
    """(ranks in the whole job, this rank's place, the dimension that they cut or None) of each mesh dimension of a
    DTensor; none of other tensors. Meshes that are equal may have groups of their own."""
    mesh: Any = getattr(t, "device_mesh", None)
    if mesh is None:
        return []
    ranks_of = torch.distributed.get_process_group_ranks
    return [
        (ranks_of(mesh.get_group(i)), mesh.get_local_rank(i), getattr(placement, "dim", None))
        for i, placement in enumerate(t.placements)
    ]


class TensorParallelModule(nn.Module):
    """A module whose layers may be cut. Attributes: `tp_size`, `sequence_parallel`, `tp_group`; 1, False and None where
    nothing is cut."""

    tp_size = 1
    sequence_parallel = False
    _tp_group = _Held()
    _modes: Mapping[str, str] = {}  # COLUMN or ROW, by layer
    _cut_extents: Mapping[str, str] = {}  # attributes of the extents that are cut, by the first layer's mode
    _styled = False  # whether a ParallelStyle has made the parameters DTensors
    # Of a StatefulModule, with which it is joined.
    module_kind: str
    _role_name: Callable[[str], str]
    _rng: Callable[[torch.device, Recipe], Tensor]
    _compared: dict[Any, Any] | None = None  # the calls that ranks have compared; it saves comparing again
    _differs: RankMismatchError | None = None  # what a guard found, for the call that Dynamo traces next
    _gathered: tuple[str, ...] = ()  # layers whose weights come quantized by the whole weight's amax (parallel.prepare)

    @property
    def tp_group(self) -> Any:
        return self._tp_group.group

    def _make_cut(self, parallel: TensorParallel, **extents: int) -> None:
        """Takes how the module is cut, before the parameters exist. `extents`: those that are cut, by their names.

        **Raises** ArgumentError, ValueError, ShapeError and UnsupportedError for arguments that do not fit.
        """
        op, group = type(self).__name__, parallel.group
        size = parallel.size if group is None else torch.distributed.get_world_size(group)
        if group is not None and parallel.size not in (1, size):
            raise ValueError(f"{op}: tp_size={parallel.size}, and tp_group has {size} ranks")
        if size == 1:
            return
        cut = {layer: mode for layer, mode in parallel.modes.items() if mode is not None}
        if not cut:
            raise ArgumentError(
                f"{op}: {size} tensor-parallel ranks need a parallel_mode (LayerNormMLP: set_parallel_mode)"
            )
        if initial_recipe() is not None:
            raise UnsupportedError(f"{op}: quantized_model_init holds no weights that are cut over {size} ranks")
        for name, extent in extents.items():
            if extent % size:
                raise ShapeError(f"{op}: {name}={extent} is no multiple of the {size} tensor-parallel ranks")
        self.tp_size, self.sequence_parallel, self._modes = size, parallel.sequence, cut
        if group is not None:
            self.set_tensor_parallel_group(group)

    def become_cut(self, parallel: TensorParallel) -> None:
        """Makes a whole module one that is cut over a group; its caller cuts the parameters as `cuts` says.
        **Raises** what a constructor does, before anything is changed."""
        extent = self._cut_extents[str(next(iter(parallel.modes.values())))]
        self._make_cut(parallel, **{extent: getattr(self, extent)})
        setattr(self, extent, getattr(self, extent) // self.tp_size)
        self._styled = True

    def _local(self, t: Any) -> Any:
        """A parameter as this rank's layers read it: the local part of a DTensor that a style has made. Its gradient is
        placed as the parameter is, since cut layers sum the gradients of what every rank has."""
        if not self._styled or t is None:
            return t
        if not hasattr(t, "device_mesh"):
            raise ArgumentError(
                f"{type(self).__name__}: a style made the parameters DTensors, and found a plain {type(t).__name__}"
            )
        if t.device_mesh.ndim > 1:
            raise ArgumentError(f"{type(self).__name__}: FSDP2 has not gathered a parameter; call the module itself")
        return t.to_local(grad_placements=t.placements)

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Names the process group that a module with `tp_size` > 1 is cut over. **Raises** ValueError for a group of
        another size, UnsupportedError for a module that was made whole."""
        size = 1 if tp_group is None else torch.distributed.get_world_size(tp_group)
        if size != self.tp_size:
            if self.tp_size == 1:
                raise UnsupportedError(
                    f"{type(self).__name__} is whole; make it with tp_size={size} and a parallel_mode, or cut it by a "
                    "style of diptych.torch.parallel"
                )
            raise ValueError(f"{type(self).__name__}: the group has {size} ranks, and tp_size is {self.tp_size}")
        self._tp_group = _Held(tp_group)

    def _cut(self, layer: str) -> Cut | None:
        """How a layer of this module is cut. **Raises** ArgumentError before there is a group."""
        mode = self._modes.get(layer)
        if mode is None:
            return None
        return Cut(mode, self.sequence_parallel, self.tp_size, layer in self._gathered, self._require_group())

    def _require_group(self) -> Any:
        """The process group of a module that is cut. **Raises** ArgumentError before there is one."""
        if self._tp_group.group is None:
            raise ArgumentError(
                f"{type(self).__name__}: tp_size is {self.tp_size}, and there is no group; "
                "call set_tensor_parallel_group or give tp_group"
            )
        return self._tp_group.group

    def _require_alike(self, layer: str, recipe: Recipe, plan: LinearPlan, x: Tensor) -> None:
        """Compares what a layer runs by over its group, at its first call by a recipe, for an input or weight `x`.
        **Raises** RankMismatchError on every rank if they differ. Nothing is exchanged for fake tensors, of which one
        rank alone may have some, nor for those on the meta device."""
        if not torch.compiler.is_compiling():
            key = self._call_of(layer, plan, x.dtype)
            if key not in (self._compared or ()) and not x.is_meta and fake_mode() is None:
                aside(self._compare, key, plan, recipe, x.device)
            return
        from diptych.torch.private.dynamo import comptime  # importing it takes a second

        dtype, device = x.dtype, x.device  # noqa: F841 - read below
        comptime(_compare_while_tracing)

    def _plan_of(self, layer: str, recipe: Recipe) -> LinearPlan:
        return schedule(recipe, self.module_kind, self._role_name(layer), False, False).plan

    def _call_of(self, layer: str, plan: LinearPlan, dtype: torch.dtype) -> tuple[Any, ...]:
        """Returns by what a layer's call is known as one that ranks have compared."""
        return layer, id(plan), id(self._tp_group.group), dtype, self.sequence_parallel

    def _compare(self, key: tuple[Any, ...], plan: LinearPlan, recipe: Recipe, device: torch.device) -> None:
        """Compares a call over the ranks of its group. **Raises** RankMismatchError on every rank if they differ."""
        if (error := self.__dict__.pop("_differs", None)) is not None:
            raise error
        layer, *_, dtype, sequence_parallel = key
        group, name = self._require_group(), self._role_name(layer)
        rng = self._rng(device, recipe) if plan.needs_rng else None
        operands = {"the input": plan.input, "the weight": plan.weight, "the output's gradient": plan.grad_output}
        values = {
            "the recipe": "none: high precision" if recipe is HIGH_PRECISION else described(recipe),
            **{f"the format of {operand}": described((t.rowwise, t.columnwise)) for operand, t in operands.items()},
            "the formats of results": described(plan.results),
            "options of the products": described(plan.options),
            "the dtype": str(dtype),
            "tp_size": str(self.tp_size),
            "sequence_parallel": str(sequence_parallel),
            "parallel_mode": self._modes[layer],
            "whether parallel.prepare gathers the weight": str(layer in self._gathered),
            "the random state (ranks that share a layer call diptych.torch.seed_rng alike)": (
                "none" if rng is None else str(rng.tolist())
            ),
        }
        require_alike(f"{type(self).__name__} {name!r}" if name else type(self).__name__, values, [group], device)
        if self._compared is None:
            self._compared = {}
        self._compared[key] = plan, group  # held, so that their ids stay their own

    def _amax_group(self, recipe: Recipe, groups: Mapping[str, Any], delayed: bool = False) -> Any:
        """Returns the process group that amaxes of a call, or of delayed scales, are reduced over, or None.

        **Raises** ValueError for a group that leaves out ranks of a cut layer: every amax must be the whole tensor's.
        """
        group = amax_group(recipe, groups, delayed)
        if self.tp_size == 1:
            return group
        cut_over = self._tp_group.group
        if group is None or group is cut_over:
            return cut_over
        ranks_of = torch.distributed.get_process_group_ranks
        if not delayed or any([rank not in ranks_of(group) for rank in ranks_of(cut_over)]):
            raise ValueError(
                f"{type(self).__name__} is cut over a tensor-parallel group, over which its amaxes are reduced: "
                "its recipe names no other amax_group, and an amax_reduction_group holds all ranks of it"
            )
        return group

    # --- parameters ---

    def cuts(self) -> dict[str, ParameterCut]:
        """How parameters of this module are cut, by their names; others are whole on every rank."""
        made = {}
        for layer, mode in self._modes.items():
            weight, bias = _names(layer)
            made[weight] = ParameterCut(0 if mode == COLUMN else 1, self._stacked(layer))
            if mode == COLUMN:
                made[bias] = made[weight]
        return made

    def _stacked(self, layer: str) -> int:
        """The number of weights that a layer's parameters stack, such as gate and value; each is cut."""
        return 1

    def _draw(self, layer: str, init_method: Any = None) -> None:
        """Fills a layer's weight and bias with what `initialize` draws, or with this rank's part of it."""
        (weight, bias), cuts = _names(layer), self.cuts()
        held: dict[str, Any] = {name: p for name in (weight, bias) if (p := getattr(self, name)) is not None}
        if weight not in cuts:
            initialize(held[weight], held.get(bias), init_method)
            return
        self._mark(layer)
        whole, tp = {}, torch.distributed.get_process_group_ranks(self.tp_group) if self.tp_group is not None else []
        for name, p in held.items():
            cut, shape = cuts.get(name), list(p.shape)
            if cut is not None and not any([ranks == tp for ranks, *_ in _dimensions(p)]):
                shape[cut.dim] *= self.tp_size  # a DTensor that a style made has the whole shape
            whole[name] = torch.empty(shape, dtype=p.dtype, device=p.device)
        if whole[weight].is_meta:
            return
        with torch.no_grad():
            initialize(whole[weight], whole.get(bias), init_method)
            for name, p in held.items():
                part = self._part(whole[name], cuts[name]) if name in cuts else whole[name]
                for ranks, rank, dim in _dimensions(p):  # FSDP2 cuts the part
                    if dim is not None and ranks != tp:
                        part = [*part.chunk(len(ranks), dim), *[part.narrow(dim, 0, 0)] * len(ranks)][rank]
                (p.to_local() if hasattr(p, "to_local") else p).copy_(part)

    def _mark(self, layer: str) -> None:
        """Sets the attributes by which Megatron-LM's trainers know a layer's cut parameters."""
        cuts = self.cuts()
        for name in _names(layer):
            p: Any = getattr(self, name)
            if p is not None:
                p.tensor_model_parallel, p.partition_stride = name in cuts, self._stacked(layer)
                p.partition_dim = cuts[name].dim if name in cuts else None

    def _part(self, whole: Tensor, cut: ParameterCut) -> Tensor:
        """This rank's part of a whole parameter."""
        if self._tp_group.group is None:
            raise ArgumentError(
                f"{type(self).__name__}: which part of a weight is this rank's is not known; give tp_group, or make "
                "the module on the meta device and call set_tensor_parallel_group before its parameters are filled"
            )
        rank, (dim, parts) = torch.distributed.get_rank(self._tp_group.group), cut
        return torch.cat([part.chunk(self.tp_size, dim)[rank] for part in whole.chunk(parts, dim)], dim)

    def _repr_cut(self) -> str:
        """Returns how a layer is cut, for `print`."""
        if self.tp_size == 1:
            return ""
        modes = "+".join(self._modes.values())
        return f", {modes}-parallel over {self.tp_size}{', sequence_parallel' if self.sequence_parallel else ''}"


def _compare_while_tracing(context: Any) -> None:
    """Runs where Dynamo traces `_require_alike`. Before a run of the graph by a module that has not compared the call,
    it is compared, too; if ranks differ there, Dynamo traces again, which raises the error."""
    names = ("self", "layer", "recipe", "dtype", "device")
    module, layer, recipe, dtype, device = [traced_local(context, name) for name in names]
    plan = module._plan_of(layer, recipe)
    key = module._call_of(layer, plan, dtype)
    if key not in (module._compared or ()):
        module._compare(key, plan, recipe, device)
    waiting: list[weakref.ref[Any]] = []

    def fits(other: Any) -> bool:
        waiting[:] = [] if key in (other._compared or ()) else [weakref.ref(other)]
        return True  # the module's own recipe and options are not known to be the graph's yet

    def compare() -> RankMismatchError | None:
        other: Any = waiting.pop()() if waiting else None
        if other is None:
            return None
        of_other = other._plan_of(layer, recipe)  # it may have another name, group or options
        key_of_other = other._call_of(layer, of_other, dtype)
        try:
            if other._differs is None and key_of_other not in (other._compared or ()):  # Dynamo may ask again
                other._compare(key_of_other, of_other, recipe, device)
        except RankMismatchError as error:  # a guard cannot raise
            other.__dict__["_differs"] = error
        return other._differs

    before_each_call(context, "self", fits, compare)


def _names(layer: str) -> tuple[str, str]:
    """The names of a layer's weight and bias."""
    return (f"{layer}_weight", f"{layer}_bias") if layer else ("weight", "bias")
