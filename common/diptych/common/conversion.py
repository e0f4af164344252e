"""Rules that choose a recipe for each module by its path, and the report of `convert`, for torch and for JAX.

A path names a module by its place in the model, "blocks/0/mlp/up"; the model's own path is "". A rule is a pattern and
a recipe, or None for modules that stay as they are. Patterns are compared with the path part by part:

    *  ?  [ab]     as in a shell, inside of one part: "block_*/up" matches "block_3/up"
    **             any number of parts, also none: "blocks/**" matches "blocks/0/mlp/up", and "**" every path

The first rule that matches a path decides on it.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from diptych.common.arguments import require_recipe
from diptych.common.errors import ArgumentError, ExplainedWarning
from diptych.common.recipes import Recipe


class ConvertWarning(ExplainedWarning):
    """A layer that `convert` left as it is, though it multiplies by matrices as convertible layers do.

    **Cause:** A subclass of nn.Linear with a forward of its own, a layer whose forward is never called (the output
    projection of nn.MultiheadAttention), or stacks of matrices in a kind of module that `convert` does not know.

    **Remedy:** None is needed if the layer may stay in high precision. Otherwise replace it by `dt.Linear` or
    `dt.GroupedLinear`, or call `dt.linear` in its forward. A filter that leaves the layer out also ends the warning.
    """


# --- rules -----------------------------------------------------------------------------------------------------------


class Rule(NamedTuple):
    """A pattern of paths, and the recipe of the modules that it matches; None: they stay as they are."""

    pattern: str
    recipe: Recipe | None


class Rules(tuple[Rule, ...]):
    """Rules in their order."""

    @classmethod
    def of(cls, op: str, rules: Any) -> Rules:
        """Returns rules from a recipe, which is that of all paths, a mapping, or a sequence of pairs.

        **Raises:** ArgumentError for anything else, ValueError for no rules, an empty pattern or a pattern given twice.
        """
        if isinstance(rules, Recipe) or (isinstance(rules, type) and issubclass(rules, Recipe)):
            rules = {"**": rules}
        pairs = list(rules.items()) if isinstance(rules, Mapping) else rules
        if not isinstance(pairs, Sequence) or isinstance(pairs, str):
            raise ArgumentError(
                f"{op}: rules must be a recipe, a mapping of patterns to recipes or a sequence of such pairs, got "
                f"{type(rules).__name__}"
            )
        made = cls(_rule(op, pair) for pair in pairs)
        if not made:
            raise ValueError(f'{op}: the rules are empty; {{"**": recipe}} converts every layer')
        patterns = [rule.pattern for rule in made]
        if twice := sorted({p for p in patterns if patterns.count(p) > 1}):
            raise ValueError(f"{op}: the pattern {twice[0]!r} is given twice; the first rule that matches decides")
        return made

    def find(self, path: str) -> Rule | None:
        """Returns the first rule that matches a path."""
        return next((rule for rule in self if matches(rule.pattern, path)), None)

    def require_used(self, op: str, layers: Iterable[str], others: Iterable[str]) -> None:
        """**Raises** ValueError if a rule decides on nothing. `layers`: paths of layers that a rule may convert;
        `others`: of other modules with parameters, which a rule with None may name too."""
        layers, others = list(layers), list(others)
        for rule in self:
            paths = layers if rule.recipe is not None else layers + others
            found = [path for path in paths if matches(rule.pattern, path)]
            if any(self.find(path) == rule for path in found):
                continue
            if found:
                first = self.find(found[0])
                assert first is not None
                raise ValueError(
                    f"{op}: the rule {rule.pattern!r} never decides: an earlier one, {first.pattern!r}, matches "
                    f"{found[0]!r} first; put the narrower rule before the wider one"
                )
            inside = f"{rule.pattern}/**"
            if taken := [path for path in others if matches(rule.pattern, path)]:
                what = f"only {taken[0]!r}, which has no product that could be converted"
            elif any(matches(inside, path) for path in paths):
                what = f"no layer, but {inside!r} would match layers inside of it"
            else:
                what = "no module"
            near = ", ".join([repr(path) for path in _near(rule.pattern, paths)]) or "there are none"
            raise ValueError(f"{op}: the rule {rule.pattern!r} matches {what}; near paths: {near}")


def _rule(op: str, pair: Any) -> Rule:
    if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2 or not isinstance(pair[0], str):
        raise ArgumentError(f"{op}: a rule must be a pair of a pattern (str) and a recipe or None, got {pair!r}")
    pattern, recipe = pair
    if not pattern:
        raise ValueError(f'{op}: a pattern is empty; "**" matches every path')
    require_recipe(op, recipe)
    return Rule(pattern, recipe)


def matches(pattern: str, path: str) -> bool:
    """Returns whether a pattern matches a path; see the module's docstring."""
    return _match(pattern.split("/"), path.split("/") if path else [])


def _match(pattern: list[str], path: list[str]) -> bool:
    if not pattern:
        return not path
    if pattern[0] == "**":
        return _match(pattern[1:], path) or (bool(path) and _match(pattern, path[1:]))
    return bool(path) and fnmatchcase(path[0], pattern[0]) and _match(pattern[1:], path[1:])


def _near(pattern: str, paths: list[str], count: int = 5) -> list[str]:
    """Returns the paths that resemble a pattern most, the nearest first."""
    return sorted(paths, key=lambda path: -difflib.SequenceMatcher(None, pattern, path).ratio())[:count]


def reason(embedding: bool, ranks: Iterable[int], attends: bool = False) -> str:
    """Returns why a module that is no layer for `convert` is left. `ranks`: of its parameters. `attends`: whether
    embeddings have a method that multiplies by their matrix, as flax's have."""
    if embedding:
        return f"an embedding, {'whose attend stays in high precision' if attends else 'which multiplies by none'}"
    return "vectors alone, no matrix" if all([rank < 2 for rank in ranks]) else "no layer that convert knows"


# --- the report ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ConvertedModule:
    """One module with parameters of its own. `kind`: its class before. `parameters`: the count of their elements; a
    tied parameter counts at its first module. `converted`: whether the module quantizes now. `why`: the reason if it
    does not, else empty. `recipe`: its own; None for one that is not converted, or that quantizes in regions alone.
    `held`: the formats in which it holds weights quantized; empty for none. `held_bytes`: of their payload and scales,
    tied ones counted once. `unheld`: why weights are not held though this was asked for."""

    name: str
    kind: str
    parameters: int
    converted: bool
    why: str
    recipe: Recipe | None = None
    held: str = ""
    held_bytes: int = 0
    unheld: str = ""


@dataclasses.dataclass(frozen=True)
class ConversionReport:
    """Says which modules of a model quantize since `convert`, which do not, and why.

    `modules`: those with parameters, in the model's order. `str()` has one line for all modules of the same class,
    recipe and reason, with the number of their parameters.
    """

    modules: tuple[ConvertedModule, ...]

    @property
    def converted(self) -> int:
        """The count of numbers in the parameters of modules that quantize."""
        return sum([m.parameters for m in self.modules if m.converted])

    @property
    def left(self) -> int:
        """The count of numbers in the parameters of all other modules."""
        return sum([m.parameters for m in self.modules if not m.converted])

    @property
    def held_bytes(self) -> int:
        """The bytes of payload and scales of all weights that are held quantized."""
        return sum([m.held_bytes for m in self.modules])

    @property
    def need_region(self) -> tuple[ConvertedModule, ...]:
        """The converted modules without a recipe of their own: they run in high precision outside of regions."""
        return tuple([m for m in self.modules if m.converted and m.recipe is None])

    def __str__(self) -> str:
        total = self.converted + self.left
        share = f"{100 * self.converted / total:.1f} %" if total else "nothing"
        lines = [f"convert: {self.converted:,} of {total:,} parameters ({share}) are in layers that quantize"]
        if held := [m for m in self.modules if m.held]:
            lines[0] += f"; weights of {len(held)} are held quantized, in {self.held_bytes:,} bytes"
        rows: dict[tuple[bool, str, str], list[ConvertedModule]] = {}
        for m in self.modules:
            said = m.why if not m.converted else "in regions alone" if m.recipe is None else type(m.recipe).__name__
            said += f", held as {m.held}" if m.held else ""
            said += f", not held: {m.unheld}" if m.unheld else ""
            rows.setdefault((not m.converted, m.kind, said), []).append(m)
        for (left, kind, said), found in sorted(rows.items(), key=lambda row: row[0][0]):
            count, names = sum([m.parameters for m in found]), found[0].name or "the model"
            names += f" and {len(found) - 1} more" if len(found) > 1 else ""
            lines.append(
                f"  {'left     ' if left else 'converted'} {count:>15,}  {kind}: {names}{said and f'; {said}'}"
            )
        if needed := len(self.need_region):
            lines.append(
                f"  a region is still needed: converted modules without a recipe of their own, {needed}, run in high "
                "precision outside of autocast regions"
            )
        return "\n".join(lines)
