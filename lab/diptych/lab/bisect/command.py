"""The command `diptych bisect`."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import pathlib
import shlex
import sys
import tempfile
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from diptych.common.files import replacing
from diptych.lab import files
from diptych.lab.bisect.forward import CODE_FAILS, BisectError, Inputs, ModuleCall
from diptych.lab.bisect.narrow import Narrowed, narrow
from diptych.lab.bisect.script import LARGEST_TEXT, Script, archive, compressed, script, whole
from diptych.lab.bisect.search import PLAIN, Found, Outcome, Side, Site, search
from diptych.lab.capture import CaptureWarning
from diptych.lab.diff import mapping, names
from diptych.lab.frontend import Frontend, require
from diptych.lab.output import Output
from diptych.lab.replay.op import Bits, Op
from diptych.lab.traces import is_recorded
from diptych.lab.traces.schema import to_json

DIFFERS = 1
_LISTED = 5


def run(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Feeds A's activations into B; prints the first module that makes a difference, and a script that reproduces it.
    Returns 0 if no module does and no output has another shape, else 1.

    **Raises** BisectError if the models cannot be bisected, DiffError if the map does not fit, FrontendError if a
    framework cannot run, FileError if a file cannot be read or written.
    """
    inputs = read_inputs(args.inputs)
    output = Output(args.json)
    for option, path in (("--inputs", args.inputs), ("--map", args.map), ("--out", args.out)):
        if output.path and path is not None and files.real(output.path) == files.real(path):
            raise BisectError(f"--json {output.path}: would replace {option} {path}; name another file")
    rules = mapping.read(args.map) if args.map else None
    beside = _beside(args) if args.out else None
    with _importing(pathlib.Path.cwd()), tempfile.TemporaryDirectory(prefix="diptych-bisect-") as folder:
        a, b = (
            _side(name, spec, framework, inputs, args, pathlib.Path(folder) / name)
            for name, spec, framework in (("A", args.a, args.framework_a), ("B", args.b, args.framework_b))
        )
        with warnings.catch_warnings():
            # Captures warn of gradients and other tensors that a bisection does not use.
            warnings.simplefilter("ignore", CaptureWarning)
            with args.progress.stage("feeding A's values into B"):
                outcome = search(a, b, rules)
        if beside is not None:
            _require_no_module(args.out, beside)
        output.say(text(outcome, a, b))
        if outcome.found is None:
            output.give(data(outcome, a, b))
            return DIFFERS if outcome.shapes else 0
        replays = (_replay(a.framework, args.device), _replay(b.framework, args.device))
        narrowed = []
        try:
            with args.progress.stage("recording operations"):
                narrowed = narrow(a, b, outcome, replays)
            output.say("\n".join(line for each in narrowed for line in _narrowed(each)) or _NO_OPERATION)
        except BisectError as e:  # the model's code may fail where its operations are recorded
            output.say(f"Operations could not be seen: {e}")
        command = shlex.join(["diptych", *arguments])
        with args.progress.stage("making the script"):
            made = script(a, b, outcome.found, outcome.sites, command, args.device)
    if made is None:
        output.say("\nNo script was made: no module around the difference can be called on inputs written as text.")
    else:
        _show(made, args.out, beside, output)
    output.give(data(outcome, a, b, narrowed))
    return DIFFERS


def _show(made: Script, out: pathlib.Path | None, beside: pathlib.Path | None, output: Output) -> None:
    large = len(compressed(made.data)) > LARGEST_TEXT
    if out is None:
        if large:
            output.say(f"\nThe script's arrays take more than {LARGEST_TEXT} bytes: --out FILE.py writes it to files.")
            return
        output.say(f"\n{whole(made, None)}".removesuffix("\n"))
        return
    if large and beside is not None:
        with replacing(beside) as f:
            f.write(archive(made.data))
        files.write_text(out, whole(made, beside.name))
        output.say(f"\nwritten: {out}, {beside}")
    else:
        files.write_text(out, whole(made, None))
        output.say(f"\nwritten: {out}")


def _beside(args: argparse.Namespace) -> pathlib.Path:
    """Returns the path of the file beside a script that may hold its arrays. **Raises** FileError if either file cannot
    be written, BisectError if one would replace an input file."""
    out: pathlib.Path = args.out
    files.require_writable("--out", out, [])
    beside = out.with_name(f"{out.stem}_data.npz")
    files.require_writable("--out", beside, [])
    for path in (out, beside):
        for option, given in (("--inputs", args.inputs), ("--map", args.map)):
            if given is not None and files.real(path) == files.real(given):
                raise BisectError(f"--out {out}: would replace {option} {given}; name another file")
    return beside


def _require_no_module(*written: pathlib.Path) -> None:
    """**Raises** BisectError if a file to be written is the source of an imported module, such as a factory's."""
    modules = {name: getattr(m, "__file__", None) for name, m in list(sys.modules.items())}
    sources = {files.real(pathlib.Path(source)): name for name, source in modules.items() if source}
    for path in written:
        if (name := sources.get(files.real(path))) is not None:
            raise BisectError(f"--out {path}: would replace the source of the module {name}; name another file")


# --- arguments ---


@contextlib.contextmanager
def _importing(folder: pathlib.Path) -> Iterator[None]:
    """Makes modules in a folder importable within the context."""
    sys.path.insert(0, os.fspath(folder))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # a factory's module may have changed the list
            sys.path.remove(os.fspath(folder))


def read_inputs(path: pathlib.Path) -> Inputs:
    """Reads a model's arguments from an .npz file: arg0, arg1, ... are positional, all others are keyword arguments.

    **Raises** FileError if the file cannot be read, BisectError if it is not such a file.
    """
    with files.reading(path) as f:
        try:
            found = np.load(f, allow_pickle=False)
            if not isinstance(found, np.lib.npyio.NpzFile):
                raise BisectError(f"{path}: is no .npz file but one array; save it by np.savez")
            arrays = {name: found[name] for name in found.files}
        except (ValueError, EOFError, KeyError, OSError, zipfile.BadZipFile, zlib.error, NotImplementedError) as e:
            if isinstance(e, BisectError):
                raise
            raise BisectError(f"{path}: is no .npz file that can be read: {e}") from e
    if not arrays:
        raise BisectError(f"{path}: has no arrays; save the model's arguments by np.savez(path, arg0=...)")
    for name, x in arrays.items():
        if not name.isidentifier():
            raise BisectError(
                f"{path}: {name[:100]!r} is no name of an argument; name arrays arg0, arg1, ... or as keyword arguments"
            )
        if not is_recorded(x.dtype.name) or not x.dtype.isnative:
            raise BisectError(
                f"{path}: {name}: arrays of {x.dtype} cannot be inputs; save real numbers or bools in this machine's "
                "byte order"
            )
    positions = sorted((n for n in arrays if n.startswith("arg") and n[3:].isdecimal()), key=lambda n: int(n[3:]))
    if positions != [f"arg{i}" for i in range(len(positions))]:
        raise BisectError(f"{path}: positional arguments must be arg0, arg1, ..., got {', '.join(positions)}")
    return Inputs(tuple(arrays[n] for n in positions), {n: x for n, x in arrays.items() if n not in positions})


def _side(
    name: str, spec: str, framework: str | None, inputs: Inputs, args: argparse.Namespace, folder: pathlib.Path
) -> Side:
    option = f"--{name.lower()} {spec}"
    with args.progress.stage(f"making {spec}"):
        model = _called(option, factory(option, spec))
    is_torch = any((c.__module__, c.__name__) == ("torch.nn.modules.module", "Module") for c in type(model).__mro__)
    if not callable(model):
        raise BisectError(f"{option}: must return a model that can be called, got {type(model).__name__}")
    if framework is not None and is_torch != (framework == "torch"):
        kind = f"{type(model).__name__}, which is {'a' if is_torch else 'no'} torch.nn.Module"
        raise BisectError(f"--framework-{name.lower()} {framework}: {spec} returned {kind}; leave the option out")
    found = "torch" if is_torch else "jax"
    frontend: Frontend = require(found, args.device)
    return Side(name, spec, found, frontend.feeder(model, args.device), inputs, folder)


def factory(option: str, spec: str) -> Callable[[], Any]:
    """Returns the object named by `pkg.mod:name`. **Raises** BisectError if it is not callable or cannot be
    imported."""
    module, _, names = spec.partition(":")
    if not all(part.isidentifier() for part in [*module.split("."), *names.split(".")]):
        raise BisectError(f"{option}: a factory is written as package.module:name")
    try:
        found: Any = importlib.import_module(module)
    except CODE_FAILS as e:  # importing a module runs its code, which may raise any of these
        raise BisectError(f"{option}: {module} cannot be imported: {type(e).__name__}: {e}") from e
    for part in names.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise BisectError(f"{option}: {module} has no {names}") from None
    if not callable(found):
        raise BisectError(f"{option}: must name a function that returns a model, got {type(found).__name__}")
    return found


def _called(option: str, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except CODE_FAILS as e:
        raise BisectError(f"{option}: the function raised {type(e).__name__}: {e}") from e


# --- data ---


def data(outcome: Outcome, a: Side, b: Side, narrowed: Sequence[Narrowed] = ()) -> dict[str, Any]:
    """Returns the outcome as plain values, which `--json` writes: keys of sites, and numbers as traces spell them."""
    found = outcome.found
    return {
        "sides": [{"side": s.name, "factory": s.factory, "framework": s.framework} for s in (a, b)],
        "differs": found is not None or outcome.shapes,
        "outputs": [_site_data(site) for site in outcome.sites],
        "only_in": {"A": list(outcome.unmatched_a), "B": list(outcome.unmatched_b)},
        "ambiguous": [to_json(each) for each in outcome.ambiguous],
        "notes": list(outcome.notes),
        "found": None if found is None else {
            **_site_data(found.site),
            "module": {s: call and call.kind for s, call in (("A", found.a), ("B", found.b))},
            "inputs": [each._asdict() | {"relative": to_json(each.relative)} for each in found.inputs],
            "without_partner": list(found.others),
            "itself": found.itself,
            "around": found.around and [call.path for call in found.around],
        },
        "operations": [
            {"side": n.side, "key": n.key, "operation": n.row, "options": _plain(n.options),
             "other_options": n.other and _plain(n.other), "operands": list(n.operands), "again": to_json(n.again),
             "agrees": n.agrees}
            for n in narrowed
        ],
    }  # fmt: skip


def _site_data(site: Site) -> dict[str, Any]:
    numbers = {name: to_json(float(getattr(site, name))) for name in ("local", "noise", "limit")}
    return {"a": site.pair.a.key, "b": site.pair.b.key, **numbers, "differs": site.differs}


def _plain(options: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in options.items()}


# --- text ---


def text(outcome: Outcome, a: Side, b: Side) -> str:
    """Returns the outcome as text for the terminal."""
    lines = [f"{s.name}: {s.factory} ({s.framework})" for s in (a, b)]
    lines += ["", f"{'':2}{'local':>9} {'limit':>9}  module outputs, in the order of A"]
    lines += [_line(site) for site in outcome.sites]
    for name, keys in (("A", outcome.unmatched_a), ("B", outcome.unmatched_b)):
        if keys:
            lines.append(f"only in {name}: {_few(keys)}")
    lines += [f"ambiguous: {_few(each.a)} and {_few(each.b)}: {each.why}" for each in outcome.ambiguous]
    lines += [f"note: {note}" for note in outcome.notes]
    if outcome.found is None and outcome.shapes:
        what = "outputs of one name have other shapes, and can be neither compared nor fed"
        return "\n".join([*lines, "", f"The models differ: {what}. The {len(outcome.sites)} pairs of outputs agree."])
    if outcome.found is None:
        return "\n".join([*lines, "", f"Nothing makes a difference ({len(outcome.sites)} pairs of outputs)."])
    return "\n".join([*lines, "", *_found(outcome.found)])


def _line(site: Site) -> str:
    a, b = (s.key.removeprefix("activation:") for s in (site.pair.a, site.pair.b))
    return f"{'!' if site.differs else ' '} {site.local:9.2e} {site.limit:9.2e}  {a}" + (f" = {b}" if a != b else "")


def _found(found: Found) -> list[str]:
    site = found.site
    a, b = (s.key.removeprefix("activation:") for s in (site.pair.a, site.pair.b))
    lines = [f"The first that makes a difference: {a} in A, {b} in B."]
    for name, call in (("A", found.a), ("B", found.b)):
        if call is not None:
            lines.append(f"  {name}: {call.kind}")
    lines.append(f"  B, given A's values, is {site.local:.3g} (relative rms) from A; one ulp does {site.noise:.2g}")
    if site.pair.a.inputs:
        lines.append(f"  computed in A from: {_few(site.pair.a.inputs)}")
    for given in found.inputs:
        says = "differs" if given.differs else "is the same"
        lines.append(f"  its input {_argument(given.a)} {says} ({given.relative:.3g})")
    calls = (found.a, found.b) if found.around is None else found.around
    lines += [f"  {said}" for said in _options_apart(*calls)]
    others = ", ".join(map(_argument, found.others))
    if others:
        lines.append(f"  {others} of B: without a partner in A by shape and order, so that its values are B's")
    if found.itself is None:
        lines.append("Whether the module itself makes the difference is not known: not all of its inputs could be A's.")
    elif found.itself:
        lines.append("The module itself makes the difference: its inputs were A's.")
    elif found.itself is False:
        lines.append("Given A's inputs, the module agrees: the code between it and the modules before it differs.")
        if found.around is not None:
            a, b = (call.path or "the model itself" for call in found.around)
            lines.append(f"That code is in {a} in A, {b} in B, whose inputs are the same.")
        else:
            lines.append("That code is in no module: in the function that runs them.")
    return lines


def _replay(framework: str, device: str) -> Callable[[Op], Mapping[str, Bits]]:
    return lambda op: require(framework, device).replay(op, device)


def _options_apart(a: ModuleCall | None, b: ModuleCall | None) -> Iterator[str]:
    """Yields the arguments other than arrays, such as flags, in which two calls differ. Calls of different classes are
    compared in arguments that both have."""
    if a is None or b is None:
        return
    of_a, of_b = (dict(enumerate(call.args)) | dict(call.kwargs) for call in (a, b))
    for name in dict.fromkeys((*of_a, *of_b)) if a.kind == b.kind else [name for name in of_a if name in of_b]:
        x, y = (repr(of[name]) if name in of else "not given" for of in (of_a, of_b))
        plain = all(type(of.get(name)) in PLAIN for of in (of_a, of_b))
        if plain and x != y:
            yield f"argument {name} of {a.path or 'the model'} is {x} in A, {y} in B"


def _argument(key: str) -> str:
    """Returns an input's place in a call's arguments, such as "[0]". `key`: the key of the input."""
    return key.rpartition("/call:")[2].lstrip("0123456789")


_NO_OPERATION = "No single operation of the replay table was found to differ."


def _narrowed(found: Narrowed) -> list[str]:
    other = "B" if found.side == "A" else "A"
    lines = [f"First operation of {found.side} whose result {other} does not have: {found.key}"]
    lines.append(f"  {found.row}({_options(found.options)})")
    if found.other is not None:
        lines.append(f"  {other} has instead: {found.row}({_options(found.other)})")
        if found.operands:
            lines.append(f"    of other operands: {', '.join(found.operands)}")
        elif _meant(found.options) == _meant(found.other):
            lines.append("    of operands with the same elements, in another order")
    framework = f"  {other}'s framework"
    if isinstance(found.again, str):
        return [*lines, f"{framework} cannot compute it: {found.again}"]
    says = "gives the same" if found.agrees else "differs too"
    lines.append(f"{framework}, on the same operands and options, {says} ({found.again:.3g})")
    return lines


def _meant(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options without those that only name axes."""
    return {name: value for name, value in options.items() if name not in ("equation", "layout")}


def _options(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options.items())


def _few(keys: Sequence[str]) -> str:
    return names.few([key.removeprefix("activation:") for key in keys], _LISTED)
