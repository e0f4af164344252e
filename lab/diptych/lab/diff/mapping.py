"""The file of `diptych diff --map`, which gives B's names for names of A.

The file is an object of JSON. A key is a name of A, or a pattern in which "*" stands for any text within a part and
"**" for any text; its value is B's name, with the same wildcards in the same order, or {"name": ..., "transposed": ...}
for parameters whose names do not show whether they are transposed. The separators "." and "/" are equivalent.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Iterable
from typing import Any

from diptych.lab import files
from diptych.lab.diff import names
from diptych.lab.diff.result import DiffError
from diptych.lab.traces.schema import Site, TraceError, parse

LARGEST_FILE = 2**24
MOST_WILDCARDS = 4
_WILDCARD = re.compile(r"(\*\*|\*)")


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """One rule of the file. `a`: the pattern as it is written. `b`: B's name, split into text and wildcards in turn."""

    a: str
    pattern: re.Pattern[str]
    b: tuple[str, ...]
    transposed: bool | None

    def result(self, name: str) -> str | None:
        """Returns B's name for a normalized name of A, None if the rule does not match it."""
        found = self.pattern.fullmatch(name)
        if found is None:
            return None
        taken = iter(found.groups())
        return "".join(next(taken) if _WILDCARD.fullmatch(part) else part for part in self.b)


class Rules:
    """The rules of a file, in order. The first rule that matches a name is used."""

    def __init__(self, path: pathlib.Path, rules: tuple[Rule, ...]) -> None:
        self.path = path
        self.rules = rules

    def find(self, name: str) -> tuple[Rule, str] | None:
        """Returns the first rule that matches A's name and B's name, normalized; None if no rule matches. A rule that
        matches the name without its place in a structure of outputs matches too; the place is kept."""
        path, place = names.split(name)
        for text, rest in dict.fromkeys(((path + place, ""), (path, place))):
            for rule in self.rules:
                if (result := rule.result(text)) is not None:
                    return rule, result + rest
        return None

    def check(self, a: Iterable[Site], b: Iterable[Site]) -> list[str]:
        """Returns a note for each rule that makes some names which B does not have, so that these sites of A stay
        unmatched.

        **Raises** DiffError if a rule matches no name of A, if B has none of the names that it makes, or if it has
        "transposed" and matches no parameter.
        """
        b_names = {text for site in b for text in (names.normal(site.name), names.split(site.name).path)}
        results: dict[str, list[str]] = {rule.a: [] for rule in self.rules}
        idle = {rule.a for rule in self.rules if rule.transposed is not None}
        parameters = {site.name: names.is_parameter(site) for site in sorted(a, key=names.is_parameter)}
        for name, is_parameter in parameters.items():
            if found := self.find(name):
                results[found[0].a].append(found[1])
                if is_parameter:
                    idle.discard(found[0].a)
        notes = []
        for rule, made in results.items():
            missing = [name for name in made if name not in b_names and names.split(name).path not in b_names]
            if not made:
                raise DiffError(
                    f"{self.path}: {rule[:200]!r}: no name of A is left for this rule: none matches it, or rules above "
                    "it take them all"
                )
            if len(missing) == len(made):
                raise DiffError(
                    f"{self.path}: {rule[:200]!r}: B has no {made[0][:200]!r}, the name that the rule makes"
                )
            if missing:
                few = names.few([repr(name[:200]) for name in missing])
                notes.append(f"{self.path}: {rule[:200]!r}: of {len(made)} names that it makes, B does not have {few}")
            if rule in idle:
                raise DiffError(f'{self.path}: {rule[:200]!r}: "transposed" is for parameters, and the rule names none')
        return notes


def read(path: pathlib.Path) -> Rules:
    """Reads a file of rules. **Raises** DiffError with the file and the rule that is wrong."""
    try:
        with files.reading(path) as f:
            text = f.read(LARGEST_FILE + 1)
        if len(text) > LARGEST_FILE:
            raise DiffError(f"{path}: is larger than {LARGEST_FILE} bytes")
        found = parse(text, str(path))
    except (files.FileError, TraceError) as e:
        raise DiffError(str(e)) from None
    if type(found) is not dict or not found:
        raise DiffError(f'{path}: must be a JSON object that gives B\'s name for names of A, such as {{"a": "b"}}')
    return Rules(path, tuple(_rule(a, value, f"{path}: {a[:200]!r}") for a, value in found.items()))


def _rule(a: str, value: Any, where: str) -> Rule:
    transposed = None
    if type(value) is dict:
        if value.keys() != {"name", "transposed"} or type(value["transposed"]) is not bool:
            raise DiffError(f'{where}: an object must have "name" and "transposed", which is true or false')
        value, transposed = value["name"], value["transposed"]
    if type(value) is not str or not a or not value:
        raise DiffError(f'{where}: B\'s name must be text that is not empty, or an object with "name" and "transposed"')
    parts, b = _WILDCARD.split(names.normal(a)), tuple(_WILDCARD.split(names.normal(value)))
    if parts[1::2] != list(b[1::2]):
        raise DiffError(f"{where}: {value[:200]!r} must have the same wildcards in the same order")
    if len(parts[1::2]) > MOST_WILDCARDS or "" in parts[2:-1:2]:
        raise DiffError(f"{where}: has more than {MOST_WILDCARDS} wildcards, or two without text between them")
    pattern = "".join({"*": "([^/]*)", "**": "(.*)"}.get(p, re.escape(p)) for p in parts)
    return Rule(a, re.compile(pattern), b, transposed)
