"""Writes a script that calls one module of A and of B on the same inputs and prints the difference of their outputs.

The script needs the two factories, NumPy and the frameworks, but not diptych. Its arrays are in its text, or in a file
beside it.
"""

from __future__ import annotations

import base64
import contextlib
import io
import math
import re
import sys
import textwrap
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from diptych.lab.bisect.forward import CODE_FAILS, Forward, Inputs, ModuleCall, Slot, Unwritable
from diptych.lab.bisect.search import Found, Side, Site, array, paired_inputs, paired_values, slots, without_arrays
from diptych.lab.diff import names
from diptych.lab.traces import Tensor

LARGEST_TEXT = 2**18
"""The largest number of bytes of compressed arrays that a script's text may hold."""


class _UnwritableError(ValueError):
    """The error for a call that cannot be written as Python text."""


class Script(NamedTuple):
    """A script. `text`: its text without the arrays (see `whole`). `data`: the arrays. `path`: the path of A's module,
    "" for the whole model. `relative`: the largest relative difference that the script shows."""

    text: str
    data: Mapping[str, np.ndarray]
    path: str
    relative: float


def script(a: Side, b: Side, found: Found, sites: Sequence[Site], command: str, device: str) -> Script | None:
    """Returns a script for the innermost modules around the difference that reproduces it, None if no script does.

    Each candidate is run here, in this process; one that cannot be written or run is skipped.
    """
    for call_a, call_b in _candidates(found, sites):
        with contextlib.suppress(_UnwritableError):
            made = _written(a, b, found.calls, (call_a, call_b), sites, command, device)
            relative = _tried(made)
            if not relative <= found.site.limit:
                return made._replace(relative=relative)
    return None


def _candidates(found: Found, sites: Sequence[Site]) -> Iterator[tuple[ModuleCall, ModuleCall]]:
    """Yields corresponding calls in A and B, from the innermost outwards."""
    if found.a is None or found.b is None:
        return
    around = [list(_around(run, call)) for run, call in zip(found.calls, (found.a, found.b), strict=True)]
    for call_a in around[0]:
        partner = next((c for c in around[1] if _shared(call_a, c, sites)), None)
        inner = call_a is found.a and found.itself is False
        if partner is not None and not inner:
            yield call_a, partner


def _around(run: Forward, call: ModuleCall) -> Iterator[ModuleCall]:
    yield call
    while call.parent is not None:
        call = run.calls[call.parent]
        yield call


def _shared(a: ModuleCall, b: ModuleCall, sites: Sequence[Site]) -> list[Site]:
    """Returns the pairs of outputs that two calls have in common."""
    return [s for s in sites if s.pair.a.key in a.outputs and s.pair.b.key in b.outputs]


def _tried(made: Script) -> float:
    """Returns the difference that a script shows. **Raises** _UnwritableError if the script fails."""
    space: dict[str, Any] = {"__name__": "diptych_bisect"}
    try:
        with _kept(sys.path), contextlib.redirect_stdout(io.StringIO()):
            exec(compile(made.text, "<diptych bisect>", "exec"), space)
            return float(space["compare"](made.data))
    except CODE_FAILS as e:  # the models' code may raise any of them
        raise _UnwritableError(str(e)) from e


@contextlib.contextmanager
def _kept(items: list[str]) -> Iterator[None]:
    """Restores a list's items at the end of the context."""
    before = list(items)
    try:
        yield
    finally:
        items[:] = before


# --- text ---


class _Data:
    """The arrays of a script, each stored once."""

    def __init__(self) -> None:
        self.arrays: dict[str, np.ndarray] = {}
        self._names: dict[Any, str] = {}

    def name(self, x: Tensor) -> str:
        """Returns the name of an array in the script. A dtype that NumPy does not have is stored as float32."""
        key = x.dtype.name, x.bits.shape, x.bits.tobytes()
        if key not in self._names:
            self._names[key] = f"x{len(self.arrays)}"
            values = array(x)
            self.arrays[self._names[key]] = values.astype(np.float32) if _foreign(x) else values
        return self._names[key]


def _foreign(x: Tensor) -> bool:
    """Returns whether NumPy itself does not have the tensor's dtype."""
    return array(x).dtype.isbuiltin != 1


def _written(
    a: Side, b: Side, runs: tuple[Forward, Forward], calls: tuple[ModuleCall, ModuleCall], sites: Sequence[Site],
    command: str, device: str,
) -> Script:  # fmt: skip
    shared = _shared(*calls, sites)
    data = _Data()
    values = [dict(run.values) for run in runs]
    whole = all(not call.path and call.parent is None for call in calls)
    if not whole:
        pairs = paired_inputs(runs[0], calls[0], runs[1], calls[1], shared[0].pair.axes)
        if not pairs and not without_arrays(*calls):
            raise _UnwritableError("no input is the same in both")
        values[1] |= {y.key: x for y, x in paired_values(runs, pairs, shared[0].pair.axes)}
    parts = []
    for name, side, call, known in zip("ab", (a, b), calls, values, strict=True):
        body = _Body(side, call._replace(how="model") if whole else call, known, data, device).lines()
        what = f"the module {call.path!r}" if call.path else "the model"
        says = _quotable(f"{side.name}: {what} ({call.kind}) of {side.factory}, in {side.framework}.")
        parts.append(f'def {name}(x):\n    """{says}"""')
        parts[-1] += "\n" + textwrap.indent("\n".join(body), "    ")
    outputs = [
        f"({_places(s.pair.a.name)}, {_places(s.pair.b.name)}, {list(s.pair.a.shape)}, {_axes(s)})" for s in shared
    ]
    frameworks = sorted({side.framework for side in (a, b)})
    imports = [f"import {name}" for name in frameworks]
    if "jax" in frameworks:
        imports[:1] = ["import jax", "import jax.numpy as jnp"]
    both = " and ".join(f"{c.path or 'the whole model'} of {s.name}" for s, c in zip((a, b), calls, strict=True))
    title = f"Equal inputs, other results: {both}."
    text = _SCRIPT.format(
        title=_quotable(title), command=_quotable(command), modules=_modules(a, b),
        imports="\n".join(imports), parts="\n\n\n".join(parts),
        outputs="".join(f"\n    {o}," for o in outputs),
        names=repr(both),
    )  # fmt: skip
    return Script(text, data.arrays, calls[0].path, math.nan)


_SCRIPT = '''"""{title}

Run it in a folder from which {modules} can be imported. Written by: {command}
"""

import base64
import collections.abc
import functools
import importlib
import io
import pathlib
import sys
import zlib

{imports}
import numpy as np

sys.path.insert(0, "")  # the factories may be in the working directory

NAMES = {names}
# Where the compared arrays are in A's result and in B's; the shape of A's; B's axes in the order of A's.
OUTPUTS = [{outputs}
]


{parts}


def at(value, places):
    """Returns the array at a place in a structure, in float64."""
    for place in places:
        entry = isinstance(place, int) or isinstance(value, collections.abc.Mapping)
        value = value[place] if entry else getattr(value, place)
    value = value.detach().cpu().double().numpy() if hasattr(value, "detach") else value
    return np.asarray(value).astype(np.float64)


def compare(x):
    """Prints how the outputs differ. Returns the largest relative difference."""
    found_a, found_b, largest = a(x), b(x), 0.0
    for place_a, place_b, shape, axes in OUTPUTS:
        of_a, of_b = at(found_a, place_a), at(found_b, place_b)
        of_b = (of_b if axes is None else of_b.transpose(axes)).reshape(shape)
        same = (of_a == of_b) | (np.isnan(of_a) & np.isnan(of_b))
        apart = np.abs(np.subtract(of_b, of_a, out=np.zeros(shape), where=~same))
        worst = np.unravel_index(np.argmax(apart), apart.shape)
        scale = np.sqrt(np.mean(np.where(np.isfinite(of_a), of_a, 0) ** 2))
        rms = np.sqrt(np.mean(apart**2)) / max(scale, np.finfo(float).tiny)
        which = f", output {{list(place_a)}}" if place_a else ""
        print(f"{{NAMES}}{{which}}: relative rms of the difference {{rms:.3g}}; largest at")
        print(f"  {{[int(i) for i in worst]}}: {{of_a[worst]:.9g}} and {{of_b[worst]:.9g}}")
        largest = max(largest, float(np.nan_to_num(rms, nan=np.inf)))
    return largest


if __name__ == "__main__":
    compare(read())
'''


def whole(made: Script, file: str | None) -> str:
    """Returns the script's text with its arrays, or with the name of the file beside it that holds them."""
    if file is not None:
        read = f"def read():\n    return np.load(pathlib.Path(__file__).with_name({file!r}))\n"
        unused = ("base64", "io", "zlib")
    else:
        lines = textwrap.wrap(base64.b64encode(compressed(made.data)).decode(), 116)
        read = 'DATA = """\n' + "\n".join(lines) + '\n"""\n\n\n'
        read += "def read():\n    return np.load(io.BytesIO(zlib.decompress(base64.b64decode(DATA))))\n"
        unused = ("pathlib",)
    text = made.text.replace('\n\nif __name__ == "__main__":', f'\n\n{read}\n\nif __name__ == "__main__":')
    unused = (*unused, *(() if "functools." in text else ("functools",)))
    return "".join(line for line in text.splitlines(True) if line.strip() not in [f"import {name}" for name in unused])


def archive(data: Mapping[str, np.ndarray]) -> bytes:
    """Returns arrays as the bytes of an .npz file."""
    held = io.BytesIO()
    np.savez(held, allow_pickle=False, **data)
    return held.getvalue()


def compressed(data: Mapping[str, np.ndarray]) -> bytes:
    return zlib.compress(archive(data), 9)


def _quotable(text: str) -> str:
    """Returns text, escaped for a docstring."""
    return text.replace("\\", r"\\").replace('"', r"\"")


def _modules(*sides: Side) -> str:
    return " and ".join(sorted({side.factory.partition(":")[0] for side in sides}))


def _places(name: str) -> str:
    found = re.findall(r"""\[(?:(\d+)|'([^']*)'|"([^"]*)")\]""", names.split(name).place)
    return repr(tuple(int(number) if number else one or two for number, one, two in found))


def _axes(site: Site) -> str:
    return repr(None if site.pair.axes is None else list(site.pair.axes))


class _Body:
    """The lines of a function that calls one module."""

    def __init__(
        self, side: Side, call: ModuleCall, values: Mapping[str, Tensor], data: _Data, device: str
    ) -> None:  # fmt: skip
        self._side, self._call, self._values, self._data, self._device = side, call, values, data, device

    def lines(self) -> list[str]:
        if self._call.repeats:
            raise _UnwritableError("it runs in a loop")
        module, _, name = self._side.factory.partition(":")
        made = f'importlib.import_module("{module}").{name}()'
        if self._side.framework == "torch":
            to = "" if self._device == "cpu" else f'.to("{self._device}")'
            context, calls = "with torch.no_grad():", self._torch(f"{made}{to}")
        else:
            context = f'with jax.default_device(jax.devices("{self._device}")[0]):'
            calls = {"model": self._model, "linen": self._linen, "object": self._object}[self._call.how](made)
        return [context, *("    " + line for line in calls)]

    def _torch(self, made: str) -> list[str]:
        if self._call.how == "model":
            return self._model(made)
        module = f"module = {made}.get_submodule({self._call.path!r})"
        lines, names = self._several()
        return [module, *lines, f"return module({self._arguments(names)})"]

    def _model(self, made: str) -> list[str]:
        return [f"return {made}({self._inputs()})"]

    def _object(self, made: str) -> list[str]:
        get = "lambda m, part: m[int(part)] if part.isdecimal() else getattr(m, part)"
        lines = [f"module = functools.reduce({get}, {self._parts()!r}, {made})"]
        given = slots(self._call)
        depth = max((s.mapped for s in given), default=0)
        if not depth:
            return [*lines, f"return module({self._arguments({})})"]
        if any(s.mapped not in (0, depth) for s in given):
            raise _UnwritableError("it runs in several transformations by vmap")
        call = self._arguments({s.key: f"y{i}" for i, s in enumerate(given)})
        run = f"lambda {', '.join(f'y{i}' for i in range(len(given)))}: module({call})"
        axes = tuple(0 if s.mapped else None for s in given)
        for _ in range(depth):
            run = f"jax.vmap({run}, in_axes={axes!r})"
        return [*lines, f"run = {run}", f"return run({', '.join(self._slot(s) for s in given)})"]

    def _linen(self, made: str) -> list[str]:
        if any(s.mapped for s in slots(self._call)):
            raise _UnwritableError("it runs in a transformation by vmap")
        path = tuple(self._parts())
        return [
            "import flax.linen",
            "",
            "found, before = [], []",
            "",
            "def run(call, args, kwargs, context):",
            f'    if context.method_name != "__call__" or context.module.path != {path!r}:',
            "        return call(*args, **kwargs)",
            "    before.append(context)",
            f"    if len(before) != {self._call.call + 1}:",
            "        return call(*args, **kwargs)",
            f"    found.append(call({self._arguments({})}))",
            "    return found[0]",
            "",
            "with flax.linen.intercept_methods(run), jax.disable_jit():",
            f"    {made}({self._inputs()})",
            "return found[0]",
        ]

    def _parts(self) -> list[str]:
        return self._call.path.split("/") if self._call.path else []

    # --- arguments ---

    def _inputs(self) -> str:
        """Returns the text of the model's own arguments."""
        given: Inputs = self._side.inputs
        args = [self._array(Tensor.of(x)) for x in given.args]
        return ", ".join([*args, *(f"{name}={self._array(Tensor.of(x))}" for name, x in given.kwargs.items())])

    def _several(self) -> tuple[list[str], dict[str, str]]:
        """Returns lines that create the arrays which several arguments share, and the names of these arrays by slots'
        keys."""
        same: dict[tuple[str, str], list[str]] = {}
        for slot in slots(self._call):
            same.setdefault((slot.array or slot.key, self._slot(slot)), []).append(slot.key)
        several = [(made, keys) for (_, made), keys in same.items() if len(keys) > 1]
        lines = [f"y{i} = {made}" for i, (made, _) in enumerate(several)]
        return lines, {key: f"y{i}" for i, (_, keys) in enumerate(several) for key in keys}

    def _arguments(self, named: Mapping[str, str]) -> str:
        """Returns the text of the module's arguments. `named`: names of arrays by slots' keys; others are written
        out."""
        write = lambda s: named[s.key] if s.key in named else self._slot(s)  # noqa: E731
        args = [_expression(x, write) for x in self._call.args]
        return ", ".join([*args, *(f"{name}={_expression(x, write)}" for name, x in self._call.kwargs.items())])

    def _slot(self, slot: Slot) -> str:
        if slot.key not in self._values:
            raise _UnwritableError(f"{slot.key} was not seen")
        return self._array(self._values[slot.key])

    def _array(self, x: Tensor) -> str:
        name = f'x["{self._data.name(x)}"]'
        if self._side.framework == "jax":
            return f"jnp.asarray({name}, jnp.{x.dtype.name})" if _foreign(x) else f"jnp.asarray({name})"
        to = ([f"torch.{x.dtype.name}"] if _foreign(x) else []) + (
            [f'"{self._device}"'] if self._device != "cpu" else []
        )
        return f"torch.tensor({name})" + "".join(f".to({t})" for t in to)


def _expression(value: Any, write: Callable[[Slot], str]) -> str:
    """Returns Python's text for an argument. **Raises** _UnwritableError if there is none."""
    if isinstance(value, Slot):
        return write(value)
    if value is None or type(value) in (bool, int, str):
        return repr(value)
    if type(value) is float:
        return repr(value) if math.isfinite(value) else f'float("{value}")'
    if type(value) is list:
        return f"[{', '.join(_expression(x, write) for x in value)}]"
    if type(value) is tuple:
        return f"({''.join(_expression(x, write) + ', ' for x in value)})"
    if type(value) is dict and all(type(k) in (str, int) for k in value):
        return "{" + ", ".join(f"{k!r}: {_expression(x, write)}" for k, x in value.items()) + "}"
    if re.fullmatch(r"torch\.[a-z0-9_]+", repr(value)):  # the value is a dtype
        return repr(value)
    kind = value.kind if isinstance(value, Unwritable) else type(value).__name__
    raise _UnwritableError(f"a {kind} cannot be written as text")
