"""Quantizers as JSON objects, for files that hold quantized tensors or states.

    {"class": "MXFP8Quantizer", "fields": {"rowwise": true, ...}}

A class outside of diptych is named "module:Class". Reading imports no module and runs no code that the file names: the
class must exist in this process, as a subclass of `Quantizer`, and its constructor checks the fields.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from diptych.common.errors import ArgumentError, CheckpointError
from diptych.common.quantizers import Quantizer

_OWN = "diptych."
_SCALARS = (str, int, float, bool, type(None))


def to_json(quantizer: Quantizer) -> dict[str, Any]:
    """Returns a quantizer as an object that `json.dumps` takes.

    **Raises** TypeError for one that is compared by identity, or a field that is no string, number, bool or None.
    """
    kind, names = type(quantizer), quantizer._value_fields()
    if names is None:
        raise ArgumentError(
            f"{kind.__name__} is compared by identity and cannot be written to a file; define _value_fields() to opt in"
        )
    fields = {name: getattr(quantizer, name) for name in names}
    for name, held in fields.items():
        if type(held) not in _SCALARS:
            raise ArgumentError(f"{kind.__name__}.{name} is {held!r}, and files take strings, numbers, bools and None")
    return {"class": _name_of(kind), "fields": fields}


def from_json(record: Any) -> Quantizer:
    """Returns the quantizer of an object that `to_json` made.

    **Raises** CheckpointError for anything else, a class that this process does not have, or fields that it refuses.
    """
    if not isinstance(record, dict) or record.keys() != {"class", "fields"} or not isinstance(record["fields"], dict):
        raise CheckpointError(f"a quantizer must be written as its class and fields, the file holds {record!r}")
    name, fields = record["class"], record["fields"]
    kinds = [kind for kind in _subclasses(Quantizer) if _name_of(kind) == name]
    if not kinds:
        raise CheckpointError(
            f"the file holds a quantizer of class {name!r}, which this process does not have; import the module that "
            "defines it before reading the file"
        )
    kind = kinds[-1]  # the newest, if a notebook defined it several times
    try:
        return kind(**fields)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise CheckpointError(f"the file's {name} is refused: {error}") from error


def _name_of(kind: type) -> str:
    return kind.__qualname__ if kind.__module__.startswith(_OWN) else f"{kind.__module__}:{kind.__qualname__}"


def _subclasses(kind: type) -> Iterator[type]:
    for sub in kind.__subclasses__():
        yield sub
        yield from _subclasses(sub)
