"""A model's tensors from safetensors files, one after the other: weights that are held are quantized as they are read.

Invariants:

- The whole checkpoint is compared with the model's names and shapes before anything is read or changed.
- A tensor of the files exists in high precision in parts of `PART` bytes only, or of 128 rows where these are more.
  Formats with an amax of the whole tensor read it twice. The bits are those of quantizing the whole tensor.
- Files are read, not mapped: no page of a file counts as the process's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from diptych.common.errors import CheckpointError
from diptych.common.ops import shapes
from diptych.common.quantizers import RHT, ROW_AMAX
from diptych.common.safetensors import Entry, checkpoint_entries, joined
from diptych.torch.functional.quantize import quantize
from diptych.torch.modules import held_state
from diptych.torch.modules.base import QuantizedModule
from diptych.torch.modules.held_weights import exchange
from diptych.torch.modules.model_init import empty_held
from diptych.torch.modules.quantized_parameter import QuantizedParameter
from diptych.torch.primitives import quantize as quantize_ops
from diptych.torch.primitives.checks import HIGH_PRECISION
from diptych.torch.private.autograd import unsaved_buffers
from diptych.torch.tensors.quantized import QuantizedStack, parts_of

PART = 2 << 20
_BLOCK_ROWS = 128  # parts begin at multiples, so that no block of any format is cut
# The parts of each expert that lie one after the other in a stack of transformers' mixtures, by their names in files.
_EXPERTS = {"gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")), "down_proj": (("down_proj",), ("w2",))}
_OF_STATES = (".scale_states.", ".rng_state", "._extra_state")


class _Target(NamedTuple):
    """A parameter or a persistent buffer, and its names: several if it is tied."""

    tensor: Tensor
    names: list[str]
    modules: list[nn.Module]


class Checkpoint:
    """The files of a checkpoint, matched with a model.

    **Arguments:** `path`: as `checkpoint_entries`. `rename`: the model's name of a tensor from its name in the files.
    `strict`: every parameter and persistent buffer must be there, under one of its names, and nothing else.

    **Raises:** CheckpointError for damaged files, shapes that differ, missing and further tensors, or two of one name.
    """

    def __init__(
        self, op: str, model: nn.Module, path: str | Path, rename: Callable[[str], str] | None, strict: bool
    ) -> None:
        self.op, self.path, self.model, self.space = op, path, model, _Space()
        self.found: dict[str, Entry] = {}
        for theirs, entry in checkpoint_entries(path).items():
            name = theirs if rename is None else rename(theirs)
            if name in self.found:
                raise CheckpointError(f"{op}: {path}: rename gives two tensors the name {name!r}")
            self.found[name] = entry
        self.targets = _targets(op, model)
        self.names = {name for target in self.targets.values() for name in target.names}
        _stack_experts(self.found, self.targets)
        self.used: dict[int, tuple[str, dict[str, Entry]]] = {}  # by the target's id: its name in the files, its parts
        rest = dict(self.found)
        missing = []
        for key, target in self.targets.items():
            parts = {name: found for name in target.names if (found := self._parts_of(name))}
            for each in parts.values():
                for name in each:
                    rest.pop(name, None)
            if parts:
                name = list(parts)[-1]  # of tied ones the last, which load_state_dict leaves there too
                self.used[key] = name, parts[name]
                self._require_fits(name, parts[name], target.tensor)
            elif not any([state in f".{name}" for state in _OF_STATES for name in target.names]):
                missing.append(target.names[0])
        modules = dict(model.named_modules(remove_duplicate=False))
        self.states = {name: e for name, e in rest.items() if _module_of_state(name) in modules}
        unknown = [name for name in rest if name not in self.states]
        if strict and (missing or unknown):
            raise CheckpointError(
                f"{op}: {path}: {_listed('lacks', missing)}{' and ' if missing and unknown else ''}"
                f"{_listed('has', unknown)}{', which the model has not' if unknown else ''}; rename= maps the files' "
                "names to the model's, and strict=False takes what fits"
            )

    def _parts_of(self, name: str) -> dict[str, Entry]:
        """Returns the entries of one tensor: itself, or its payload and what stands beside it."""
        entry = self.found.get(name)
        if entry is not None and getattr(torch, entry.dtype) in HIGH_PRECISION:
            return {name: entry}
        beside = [name + s for s in held_state.COMPANIONS if name + s not in self.names]
        return {each: self.found[each] for each in (name, *beside) if each in self.found}

    def _require_fits(self, name: str, parts: dict[str, Entry], t: Tensor) -> None:
        if set(parts) != {name}:
            return  # a payload and what stands beside it, which are compared when they are read
        entry, dtype = parts[name], getattr(torch, parts[name].dtype)
        if entry.shape != tuple(t.shape):
            raise CheckpointError(f"{self.op}: {name} is {list(t.shape)} here and {list(entry.shape)} in {self.path}")
        if dtype.is_floating_point != t.is_floating_point() or entry.dtype.startswith("float8"):
            raise CheckpointError(
                f"{self.op}: {name} is {t.dtype} here and {entry.dtype} in {self.path}, without scales beside it"
            )

    # --- reading ---

    def load(self, device: torch.device | None, dtype: torch.dtype | None) -> None:
        """Fills the model. `device`: None leaves tensors where they are, and takes torch's default for those on meta.
        `dtype`: of parameters in high precision, and the logical one of those that are held; None: theirs.

        **Raises:** CheckpointError for payloads that cannot be read, and tensors that are still on meta at the end.
        """
        default = torch.get_default_device() if device is None else device
        default = torch.device("cpu") if default.type == "meta" else default
        with torch.inference_mode(False), torch.no_grad():
            self._fill_unsaved(default)
            for key, (name, parts) in sorted(self.used.items(), key=_place):
                t = self.targets[key].tensor
                to = default if device is not None or t.is_meta else t.device
                wanted = dtype if dtype is not None and _takes_dtype(t) else t.dtype
                exchange(self.op, name, t, self._made(key, name, parts, to, wanted))
            self._load_states()
        self._require_filled()

    def _made(self, key: int, name: str, parts: dict[str, Entry], device: torch.device, dtype: torch.dtype) -> Tensor:
        """Returns a new tensor with the values of the files."""
        t = self.targets[key].tensor
        if len(parts) == 1 and name in parts:
            read = _Reader(parts[name], self.space)
            if not isinstance(t, QuantizedParameter):
                return read.whole(device, dtype)
            made = empty_held(t.shape, dtype, t.quantizer, device)
            fill(made, lambda begin, end: read.rows(begin, end).to(device, dtype))
            if t._awaits_init:
                made._high_precision_init_val = read.whole(torch.device("cpu"), dtype)
            return made
        if not any([isinstance(module, QuantizedModule) for module in self.targets[key].modules]):
            raise CheckpointError(
                f"{self.op}: {name} is quantized in {self.path} ({', '.join(parts)}), and the module that holds it "
                "reads plain weights alone"
            )
        tensors = {n: _Reader(e, self.space).whole(device, getattr(torch, e.dtype)) for n, e in parts.items()}
        return held_state.read_weight(name, t, tensors).to(dtype)

    def _load_states(self) -> None:
        """Gives modules their scales and random generators from the files; those left on meta are made anew."""
        below: dict[str, dict[str, Tensor]] = {}
        for name, entry in self.states.items():
            path = str(_module_of_state(name))
            local = name[len(path) + 1 :] if path else name
            below.setdefault(path, {})[local] = _Reader(entry, self.space).whole(
                torch.device("cpu"), getattr(torch, entry.dtype)
            )
        for path, module in self.model.named_modules(remove_duplicate=False):
            if isinstance(module, QuantizedModule):
                module.leave_meta()
            given = below.get(path, {})
            if given and module.load_state_dict(given, strict=False).unexpected_keys:
                raise CheckpointError(f"{self.op}: {path} has no state {next(iter(given))!r}, which {self.path} holds")
            if given and isinstance(module, QuantizedModule):
                module.leave_meta()  # loading a random generator alone drops the scales

    # --- what no file holds ---

    def _fill_unsaved(self, device: torch.device) -> None:
        """Gives values to buffers on meta that checkpoints do not hold, by the model's own `_init_weights`, as
        transformers' models have it; what this does not write stays on meta."""
        for path, module in self.model.named_modules():
            unsaved = {
                n: b for n, b in module._buffers.items() if b is not None and b.is_meta and id(b) not in self.targets
            }
            initializes = self._initializer(path) if unsaved else None
            if initializes is None or isinstance(module, QuantizedModule):
                continue
            fresh = {n: torch.empty_like(b, device=device) for n, b in unsaved.items()}
            module._buffers.update(fresh)
            with torch.device(device):
                initializes(module)
            for name, b in fresh.items():
                if module._buffers[name] is b and b._version == 0:  # nothing wrote it
                    module._buffers[name] = unsaved[name]

    def _initializer(self, path: str) -> Callable[[nn.Module], Any] | None:
        """Returns the `_init_weights` of the innermost module around a path that has one."""
        parts = path.split(".") if path else []
        for n in range(len(parts), -1, -1):
            found = getattr(self.model.get_submodule(".".join(parts[:n])), "_init_weights", None)
            if callable(found):
                return found
        return None

    def _require_filled(self) -> None:
        tensors = [*self.model.named_parameters(), *self.model.named_buffers()]
        if left := [name for name, t in tensors if t.is_meta]:
            raise CheckpointError(
                f"{self.op}: {_listed('still on the meta device:', left)}: {self.path} does not hold them, and nothing "
                "computes them. Make the model with its parameters alone on meta (accelerate.init_empty_weights()), or "
                "assign these tensors before"
            )


def _stack_experts(found: dict[str, Entry], targets: dict[int, _Target]) -> None:
    """Puts the matrices of experts that files hold one by one in place of the stacks that the model has of them."""
    stacks = [(name, target.tensor.shape) for target in targets.values() for name in target.names]
    for name, shape in stacks:
        path, _, stack = name.rpartition(".")
        for own in _EXPERTS.get(stack, ()) if len(shape) == 3 and name not in found else ():
            names = [f"{path}.{e}.{part}.weight".lstrip(".") for e in range(shape[0]) for part in own]
            if not all([each in found for each in names]):
                continue
            pieces = [found[each] for each in names]
            entry = joined(pieces, (*shape[:2], *pieces[0].shape[-1:]))
            if entry is not None:
                for each in names:
                    del found[each]
                found[name] = entry


def _takes_dtype(t: Tensor) -> bool:
    return isinstance(t, nn.Parameter) and t.is_floating_point()


def _targets(op: str, model: nn.Module) -> dict[int, _Target]:
    """Returns a model's parameters and persistent buffers, tied ones once, by their ids."""
    found: dict[int, _Target] = {}
    for path, module in model.named_modules(remove_duplicate=False):  # a module in two places has names of both
        unsaved = unsaved_buffers(module)
        own = {**module._parameters, **{n: b for n, b in module._buffers.items() if n not in unsaved}}
        for name, t in own.items():
            full = f"{path}.{name}".lstrip(".")
            if isinstance(t, UninitializedParameter):
                raise CheckpointError(f"{op}: {full} has no shape yet; run the model once, or make it with its sizes")
            if getattr(t, "main_param", None) is not None:
                raise CheckpointError(
                    f"{op}: {full} has a float32 master, which load_state_dict sets and this does not"
                )
            if t is not None:
                target = found.setdefault(id(t), _Target(t, [], []))
                target.names.append(full)
                target.modules.append(module)
    return found


def _module_of_state(name: str) -> str | None:
    """Returns the path of the module that an entry of states belongs to; None for other entries."""
    at = [i for mark in _OF_STATES if (i := f".{name}".find(mark)) >= 0]
    return name[: max(min(at) - 1, 0)] if at else None


def _listed(verb: str, names: list[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"{verb} {', '.join(names[:4])}{more}" if names else ""


def _place(used: tuple[int, tuple[str, dict[str, Entry]]]) -> tuple[Path, int]:
    entry = next(iter(used[1][1].values()))
    return entry.path, entry.begin


# --- one tensor ------------------------------------------------------------------------------------------------------


class _Space:
    """The memory into which parts are read, one after the other: freeing it each time would leave holes in the heap."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")

    def of(self, rows: int, cols: int, dtype: torch.dtype) -> Tensor:
        n = rows * cols * dtype.itemsize
        if n > self._bytes.numel():
            self._bytes = torch.empty(n, dtype=torch.uint8, device="cpu")
        return self._bytes[:n].view(dtype).view(rows, cols)


class _Reader:
    """Reads one tensor of a file, or some of its rows. A scalar has one row of one element."""

    def __init__(self, entry: Entry, space: _Space) -> None:
        self.entry, self.dtype, self.space = entry, getattr(torch, entry.dtype), space
        self.cols = entry.shape[-1] if entry.shape else 1
        self.row = self.cols * self.dtype.itemsize
        self.pieces = [(e, (e.end - e.begin) // self.row if self.row else 0) for e in entry.pieces or (entry,)]
        self.count = sum([count for _, count in self.pieces])

    def rows(self, begin: int, end: int) -> Tensor:
        """Returns rows [end - begin, K] of the tensor as a matrix, on the CPU; the next call overwrites them."""
        out = self.space.of(end - begin, self.cols, self.dtype)
        self._read(out, begin)
        return out

    def whole(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Returns the tensor on a device and in a dtype."""
        out = torch.empty(self.entry.shape, dtype=dtype, device=device)
        if not self.count:
            return out
        flat = out.view(-1, self.cols)
        if out.device.type == "cpu" and dtype == self.dtype:
            self._read(flat, 0)
        else:
            for begin, end in _parts(self.count, self.row):
                flat[begin:end].copy_(self.rows(begin, end))
        return out

    def _read(self, out: Tensor, begin: int) -> None:
        """Fills a matrix with the tensor's rows from `begin` on."""
        first, end = 0, begin + out.shape[0]
        for entry, count in self.pieces:
            low, high = max(begin, first), min(end, first + count)
            if low < high:
                self._read_bytes(entry, low - first, out[low - begin : high - begin])
            first += count

    def _read_bytes(self, entry: Entry, begin: int, out: Tensor) -> None:
        if not out.numel():
            return
        data: Any = out.view(-1).view(torch.uint8).numpy()
        left = memoryview(data)
        with open(entry.path, "rb", buffering=0) as f:
            f.seek(entry.begin + begin * self.row)
            while left:
                n = f.readinto(left)  # at most 2 GiB a call
                if not n:
                    raise CheckpointError(f"{entry.path}: ended while it was read")
                left = left[n:]


def _parts(rows: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    """Yields the parts in which a tensor is read: begin and end, in rows."""
    step = max(PART // max(row_bytes, 1) // _BLOCK_ROWS, 1) * _BLOCK_ROWS
    for begin in range(0, rows, step):
        yield begin, min(begin + step, rows)


def fill(q: Any, read: Callable[[int, int], Tensor]) -> None:
    """Quantizes a tensor into the buffers of a held weight, part after part, with the bits of the whole.

    **Arguments:** `q`: a held weight [N, K] or stack [G, N, K]. `read`: returns rows begin to end of the tensor seen as
    a matrix, in the dtype that is quantized.
    """
    if isinstance(q, QuantizedStack):
        n = q.shape[1]
        for g, one in enumerate(q.unbind()):
            fill(one, lambda begin, end, first=g * n: read(first + begin, first + end))
        return
    quantizer = q.quantizer
    rows, cols = shapes.rows_cols(q.shape)
    parts = list(_parts(rows, cols * q.dtype.itemsize))
    if quantizer.custom or quantizer.spec.flags & (ROW_AMAX | RHT):  # amaxes of parts do not make those of the whole
        parts = [(0, rows)]
    given: dict[str, Tensor] = {}
    if len(parts) > 1 and quantizer.format.tensor_amax:
        amax = torch.stack([quantize_ops.amax(read(*part)) for part in parts]).amax(0)
        two = quantizer.format.two_level
        sides = {"amax": quantizer.rowwise or not two, "columnwise_amax": two and quantizer.columnwise}
        given = {name: amax for name, wanted in sides.items() if wanted}
    at: dict[str, int] = {}
    for part in parts:
        made = quantize(read(*part), quantizer, **given)
        for name, t in parts_of(made).items():
            whole, begin = getattr(q, name), at.get(name, 0)
            if t.element_size() == 1:
                whole, t = whole.view(torch.uint8), t.view(torch.uint8)  # torch copies FP8 one element at a time
            axis = next((a for a in range(t.dim()) if t.shape[a] != whole.shape[a]), None)
            if axis is None:
                whole.copy_(t)
            else:
                whole.narrow(axis, begin, t.shape[axis]).copy_(t)
                at[name] = begin + t.shape[axis]
