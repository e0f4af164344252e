"""The report of `report`: which recipe and which kernels each layer of a model ran, and what stayed in high precision.

Both frontends make it, torch from its modules' last calls and JAX from a traced function.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

from diptych.common.recipes import Recipe

NATIVE, EMULATED, HIGH = "native", "emulated", "high precision"


@dataclasses.dataclass(frozen=True)
class ProductRun:
    """One product of a layer. `product`: "fprop", "dgrad" or "wgrad". `level`: "native", "emulated" or "high
    precision"; "missing" where no kernel takes it. `kernel`: its name in the kernel table, or empty. `formats`: of both
    operands. `note`: what the kernel table or the recipe says about it."""

    product: str
    level: str
    kernel: str = ""
    formats: tuple[str, ...] = ()
    note: str = ""


@dataclasses.dataclass(frozen=True)
class LayerRun:
    """One layer, or another module with parameters of its own. `kind`: its class. `parameters`: the count of their
    elements. `recipe`: by which it ran; None if it did not run quantized. `compiled`: whether its last call was in
    compiled code. `device`: where it ran, or empty. `rows`: of its input, None if they are unknown or vary. `weight`:
    the shape of its weight, empty if unknown. `products`: those that its call and the backward of the call compute.
    `why`: the reason if it did not run quantized, else empty."""

    name: str
    kind: str
    parameters: int
    recipe: Recipe | None = None
    compiled: bool = False
    device: str = ""
    rows: int | None = None
    weight: tuple[int, ...] = ()
    products: tuple[ProductRun, ...] = ()
    why: str = ""

    @property
    def quantized(self) -> bool:
        """Whether a product ran on quantized operands."""
        return any([p.level in (NATIVE, EMULATED) for p in self.products])

    def _said(self) -> str:
        """Says all but the name."""
        if self.recipe is None:
            return f"{self.kind}: {{}}; {self.why}"
        shape = f" {'x'.join(map(str, self.weight))}" if self.weight else ""
        rows = "" if self.rows is None else f", {self.rows} rows"
        compiled = ", compiled" if self.compiled else ""
        head = f"{self.kind}{shape}: {{}}; {type(self.recipe).__name__} on {self.device}{rows}{compiled}"
        return f"{head}; {'; '.join(self._products())}" + (f"; {self.why}" if self.why else "")

    def _products(self) -> list[str]:
        """Says which products ran how, those of one kernel together."""
        kernels: dict[tuple[str, str, str], list[str]] = {}
        for p in self.products:
            why = "" if p.level == NATIVE else p.note
            kernels.setdefault((p.level, p.kernel, why), []).append(p.product)
        said = []
        for (level, kernel, why), products in kernels.items():
            inside = ": ".join([part for part in (kernel, why) if part])
            said.append(f"{', '.join(products)} {level}{f' ({inside})' if inside else ''}")
        return said


@dataclasses.dataclass(frozen=True)
class RunReport:
    """Says for each layer of a model which recipe and kernels its last call ran, and what stayed in high precision.

    `layers`: in the model's order. `str()` prints a table with one line for layers that are equal but for their names;
    `json()` returns plain values.
    """

    layers: tuple[LayerRun, ...]

    @property
    def quantized(self) -> tuple[LayerRun, ...]:
        """The layers of which at least one product ran on quantized operands."""
        return tuple([layer for layer in self.layers if layer.quantized])

    @property
    def high_precision(self) -> tuple[LayerRun, ...]:
        """All others, each with its reason in `why`."""
        return tuple([layer for layer in self.layers if not layer.quantized])

    @property
    def levels(self) -> dict[str, int]:
        """The counts of products by level."""
        return dict(collections.Counter([p.level for layer in self.layers for p in layer.products]))

    def json(self) -> dict[str, Any]:
        """Returns the report as dicts, lists, strings and numbers; recipes as their `repr`."""
        layers = []
        for layer in self.layers:
            row = dataclasses.asdict(dataclasses.replace(layer, recipe=None))
            row["products"] = [{**p, "formats": list(p["formats"])} for p in row["products"]]
            recipe = None if layer.recipe is None else repr(layer.recipe)
            layers.append({**row, "weight": list(layer.weight), "recipe": recipe, "quantized": layer.quantized})
        return {"levels": self.levels, "layers": layers}

    def __str__(self) -> str:
        total = sum([layer.parameters for layer in self.layers])
        held = sum([layer.parameters for layer in self.quantized])
        share = f"{100 * held / total:.1f} %" if total else "nothing"
        counts = ", ".join([f"{count} {level}" for level, count in self.levels.items()]) or "none"
        lines = [
            f"report: {held:,} of {total:,} parameters ({share}) are in layers that ran quantized; products: {counts}"
        ]
        for title, layers in (("quantized", self.quantized), (HIGH, self.high_precision)):
            equal: dict[str, list[LayerRun]] = {}
            for layer in layers:
                equal.setdefault(layer._said(), []).append(layer)
            for said, found in equal.items():
                names = found[0].name or "the model"
                names += f" and {len(found) - 1} more" if len(found) > 1 else ""
                lines.append(f"  {title:<14} {said.replace('{}', names, 1)}")
        return "\n".join(lines)
