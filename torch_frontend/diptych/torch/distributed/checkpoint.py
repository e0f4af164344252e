"""Checkpoints of a model on any number of ranks, by torch.distributed.checkpoint (DCP): `save`, `load`, `export`.

A checkpoint is a folder with DCP's files (`.metadata`, `*.distcp`), `rank-00000.pt` for each rank and `header.pt`; see
`checkpoint_entries` for what they hold, and `checkpoint_folders` for their places and for saves that were interrupted.
All functions are collective: every rank of the group calls them, and an error on one rank is raised on all. All ranks
share a file system.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from diptych.common.errors import CheckpointError
from diptych.common.files import replacing
from diptych.torch.distributed import checkpoint_folders, safetensors
from diptych.torch.distributed.checkpoint_entries import (
    OPTIMIZER,
    ModelState,
    OptimizerState,
    combined,
    cut_over,
    differences,
    listed,
    name_of,
    unwrapped,
)
from diptych.torch.distributed.checkpoint_tensors import Pieces, described, is_sharded
from diptych.torch.distributed.collective_calls import agree, each, members, once, place
from diptych.torch.tensors.quantized import QuantizedTensorBase

VERSION = 1


class Loaded(NamedTuple):
    """The result of `load`: the step of the checkpoint, and the object that `save` was given as `extra`."""

    step: int
    extra: Any


def save(
    folder: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int,
    extra: Any = None,
    keep: int | None = None,
    group: Any = None,
) -> Path:
    """Writes a checkpoint, which exists under its name only once it is complete and on disk.

    **Arguments:** `folder`: the folder of all checkpoints of a run; one run at a time writes there. `model`: plain,
    sharded by FSDP2, cut over tensor-parallel groups, or in DistributedDataParallel. `extra`: the first rank's object
    that `load` returns: numbers, strings, tensors, lists and dicts of them. `keep`: the number of checkpoints to keep;
    None keeps all. `group`: the process group of the calling ranks; None for all.

    **Returns:** the checkpoint's own folder.

    **Raises** CheckpointError on every rank if one cannot write, if ranks differ in `step` or `keep`, or if other ranks
    could not read an optimizer's state; TypeError and ValueError for wrong arguments.
    """
    _require_count("step", step, 0)
    if keep is not None:
        _require_count("keep", keep, 1)
    rank, size = place(group)
    root = Path(folder)
    agree("folder, step, keep or optimizer", (str(root), step, keep, optimizer is not None), group)
    tensors, own = each(lambda: _contents(model, optimizer, group), group)
    name = once(lambda: checkpoint_folders.begin(root, step), group)
    path = checkpoint_folders.unfinished(root, name)
    each(lambda: _write(path / _rank_file(rank), own), group)
    _dcp("written", path, lambda dcp, how: dcp.save(tensors, storage_writer=dcp.FileSystemWriter(path), **how), group)

    def complete() -> None:
        _write(path / checkpoint_folders.HEADER, {"version": VERSION, "step": step, "ranks": size, "extra": extra})
        checkpoint_folders.finish(root, name, keep)

    once(complete, group)
    return root / name


def load(
    folder: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int | None = None,
    group: Any = None,
) -> Loaded:
    """Loads the latest complete checkpoint, or that of a step, into a model and its optimizer.

    The number of ranks and the sharding of the model may differ from those of the save. Quantizers' states belong to
    single ranks; `checkpoint_entries.combined` makes them for another number of ranks, and for modules that are cut
    over other ranks. A model needs no `prepare` before. Without `optimizer` the optimizer's state is left out.

    **Raises** CheckpointError on every rank if the folder holds no complete checkpoint, or if keys, shapes or dtypes of
    the checkpoint differ from those of the model on any rank; nothing has been loaded then.
    """
    root = Path(folder)
    path = root / once(lambda: checkpoint_folders.find(root, step), group)
    plan = each(lambda: _Plan(path, model, optimizer, group), group)
    read = plan.tensors
    _dcp("read", path, lambda dcp, how: dcp.load(read, storage_reader=dcp.FileSystemReader(path), **how), group)
    each(plan.finish, group)
    return Loaded(plan.header["step"], plan.header["extra"])


def export(path: str | Path, model: nn.Module, *, group: Any = None) -> None:
    """Writes a model to one safetensors file: every tensor of its state dict, whole and in high precision, without
    quantizers' states.

    Sharded tensors are gathered one after the other on every rank, and the group's first rank writes them. Replicas of
    a part must be equal.

    **Raises** CheckpointError on every rank if the file cannot be written, or if such files do not hold a dtype.
    """
    rank, _ = place(group)
    tensors = each(lambda: safetensors.in_order(_values(unwrapped(model), group)), group)

    def work() -> None:
        whole = (_whole(t, group) for t in tensors.values())
        try:
            if rank == 0:
                safetensors.write(Path(path), tensors, whole)
        finally:
            for _ in whole:  # the other ranks take part in the rest of the gathers, whatever has happened here
                pass

    each(work, group)


# --- saving ----------------------------------------------------------------------------------------------------------


def _contents(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, group: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the tensors that DCP writes, and the object that a rank writes to its own file."""
    model = unwrapped(model)
    state = ModelState(model)
    own: dict[str, Any] = {"states": {name: t.cpu() for name, t in state.states.items()}, "cut_over": cut_over(model)}
    tensors = state.tensors
    if optimizer is not None:
        of_optimizer = OptimizerState(model, optimizer)
        tensors = tensors | of_optimizer.tensors
        own |= {"kind": type(optimizer).__name__, "groups": of_optimizer.groups, "values": of_optimizer.values}
    _require_within(tensors, group)
    return tensors, own


def _require_within(tensors: Mapping[str, Any], group: Any) -> None:
    """**Raises** CheckpointError if a part of a tensor is on a rank outside of the group."""
    ranks = members(group)
    for name, t in tensors.items():
        over = t.over if isinstance(t, Pieces) else t.device_mesh.mesh.flatten().tolist() if is_sharded(t) else ()
        if not ranks.issuperset(over):
            raise CheckpointError(
                f"{name} is sharded over the ranks {sorted(over)}, the group has {sorted(ranks)}; give a process group "
                "with all ranks that hold parts of the model"
            )


def _write(path: Path, content: Any) -> None:
    with replacing(path) as f:
        torch.save(content, f)
    _read(path)  # raises if the file could not be loaded later, for instance because of objects of users' classes


def _rank_file(rank: int) -> str:
    return f"rank-{rank:05}.pt"


def _dcp(what: str, path: Path, call: Callable[[Any, dict[str, Any]], Any], group: Any) -> None:
    """Runs a function of DCP. DCP raises an error of one rank on all ranks."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    how = {"process_group": group, "no_dist": place(group)[1] == 1}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        try:
            call(dcp, how)
        except CheckpointException as e:
            said = "; ".join(f"{error} (rank {rank})" for rank, (error, _) in e.failures.items())
            raise CheckpointError(f"{path}: cannot be {what}: {said}") from e


# --- loading ---------------------------------------------------------------------------------------------------------


class _Plan:
    """A checked load: the destination of each tensor of a checkpoint. Making a plan does not change the model."""

    def __init__(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None, group: Any) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        model = unwrapped(model)
        rank, size = place(group)
        self.path = path
        self.header = _read(path / checkpoint_folders.HEADER)
        if self.header["version"] != VERSION:
            version = self.header["version"]
            raise CheckpointError(f"{path}: is written in checkpoint format {version}, this diptych reads {VERSION}")
        ranks = self.header["ranks"]
        self.own = _read(path / _rank_file(rank % ranks))
        self.states = self.own["states"]
        cut = cut_over(model)
        if ranks != size or self.own["cut_over"] != cut:
            self.states = combined([_read(path / _rank_file(r))["states"] for r in range(ranks)], rank, cut)
        metadata = FileSystemReader(path).read_metadata()
        _check_files(path, metadata)
        self.saved: dict[str, Any] = metadata.state_dict_metadata
        try:
            self.model = ModelState(model)
            self.tensors = self._checked(self.model.tensors)
            self.model.check(self.states)
            self.optimizer = None if optimizer is None else OptimizerState(model, optimizer)
            if self.optimizer is not None:
                self.tensors |= self._room(self.optimizer)
            _require_within(self.tensors, group)
        except CheckpointError as e:
            raise CheckpointError(f"{path}: {e}") from e

    def _checked(self, tensors: dict[str, Any]) -> dict[str, Any]:
        if said := differences(tensors, [name for name in self.saved if not name.startswith(OPTIMIZER)]):
            raise CheckpointError(said)
        if meta := [name for name, t in tensors.items() if isinstance(t, Tensor) and t.is_meta]:
            raise CheckpointError(f"{listed(meta)} here lie on meta: call to_empty(device=...) of the model before")
        wrong = [
            f"{name} is {found} in the checkpoint and {here} in the model"
            for name, t in tensors.items()
            if isinstance(t, Tensor) and (found := _form(self.saved[name])) != (here := f"{t.dtype}{list(t.shape)}")
        ]
        if wrong:
            raise CheckpointError(listed(wrong))
        return dict(tensors)

    def _room(self, optimizer: OptimizerState) -> dict[str, Any]:
        if "groups" not in self.own:
            raise CheckpointError("it was saved without an optimizer; load it without optimizer=")
        if self.own["kind"] != (kind := type(optimizer.optimizer).__name__):
            raise CheckpointError(f"the optimizer was {self.own['kind']}, here it is {kind}; give one of that class")
        optimizer.check(self.own["groups"])
        return {
            name: optimizer.room(name, tuple(form.size), form.properties.dtype)
            for name, form in self.saved.items()
            if name.startswith(OPTIMIZER)
        }

    def finish(self) -> None:
        """Loads the tensors that were read into the model and the optimizer."""
        self.model.load(self.tensors, self.states)
        if self.optimizer is not None:
            state = {name: t for name, t in self.tensors.items() if name.startswith(OPTIMIZER)}
            self.optimizer.load(state, self.own["values"], self.own["groups"])


def _read(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as e:  # torch's reader raises errors of many kinds for damaged files
        raise CheckpointError(f"{path}: cannot be read: {e}") from e


def _check_files(path: Path, metadata: Any) -> None:
    """**Raises** CheckpointError if one of DCP's files is too short for its contents, before anything is
    overwritten."""
    ends: dict[str, int] = {}
    for info in metadata.storage_data.values():
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    for name, end in ends.items():
        size = (path / name).stat().st_size
        if size < end:
            raise CheckpointError(f"{path / name}: damaged: it has {size} bytes, {end} were written")


def _form(saved: Any) -> str:
    properties = getattr(saved, "properties", None)
    return "no tensor" if properties is None else f"{properties.dtype}{list(saved.size)}"


# --- exporting -------------------------------------------------------------------------------------------------------


def _values(model: nn.Module, group: Any) -> dict[str, Tensor]:
    """Returns a model's tensors by name. Weights that are held quantized are returned in high precision."""
    state = ModelState(model)
    tensors = {}
    for key, t in model.state_dict().items():
        if isinstance(t, Tensor) and state.owner(name_of(key)) is None:
            master = getattr(t, "main_param", None)
            held = isinstance(t, QuantizedTensorBase)
            value = master if master is not None else t.dequantize() if held else t
            tensors[name_of(key)] = described(name_of(key), value, state.cuts.get(name_of(key)))
    _require_within({name: t for name, t in tensors.items() if isinstance(t, Pieces)}, group)
    return tensors


def _whole(t: Any, group: Any) -> Tensor:
    """Returns a whole tensor, gathered on the device on which its ranks communicate; offloaded parts are moved
    there."""
    if isinstance(t, Pieces):
        return t.gathered(group)
    return t.to(t.device_mesh.device_type).full_tensor() if is_sharded(t) else t


def _require_count(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name} must be {least} or more, got {value}")
