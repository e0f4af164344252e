"""Everything that a new block format needs, as patches: its rows, its quantizer, its recipe and their public names.

`BLOCKS` is E4M3 in blocks of 1x128 with E8M0 scales, `WHOLE_ROWS` E4M3 with one float32 scale for each whole row.
Kernels already support these elements, scale rules and blocks, so layers, frontends and kernels need no change.
"""

from __future__ import annotations

import dataclasses
import difflib

from architecture.variants import Patch

QUANTIZER = '''

@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class {name}Quantizer(_BuiltIn):
    """{about}"""

    @functools.cached_property
    def format(self) -> FormatRow:
        return find_format("float8_e4m3fn", "{scale}", {block})
'''
SCALING = '''@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class {name}Scaling(Recipe):
    """{about}"""

    def quantizer(self, role: QuantizerRole) -> Quantizer | None:
        return None if role.tensor in role.RESULTS else {name}Quantizer()


'''
H, PY = "core_cuda/include/diptych/format.h", "common/diptych/common/formats.py"
QUANTIZERS, RECIPES = "common/diptych/common/quantizers.py", "common/diptych/common/recipes.py"
FACE = "common/diptych/common/__init__.py"
H_END = "};\n// clang-format on\ninline constexpr int32_t kFormatCount"
PY_END = ")\n# fmt: on"
QUANTIZERS_END = "        return QuantSpec(self.format.id, flags, 0.0)\n"
RECIPES_START, ALL = "RECIPES: dict[str, Recipe] = _Recipes({\n", '    "LateStateWarning",\n'
ROW_H = '    {"%s", DType::%s, DType::%s, %d, %d, ScaleRule::%s, ColumnwiseLayout::%s, %sf},\n'
ROW_PY = '    FormatRow("%s", %s, %s, %d, %d, "%s", "%s", %s),\n'
DTYPES = {"f32": "float32", "e8m0": "float8_e8m0fnu"}
NAMES_PY = {"e5m2": "_E5M2", "e4m3": "_E4M3", "f32": "_F32", "e8m0": "_E8M0"}


def rows(*formats: tuple[str, str, str, int, int, str, str, str]) -> tuple[Patch, Patch]:
    """Returns patches that append formats to both tables: name, element, scale, block, rule, columnwise, tolerance."""
    in_h = "".join(ROW_H % row for row in formats)
    in_py = "".join(ROW_PY % (n, NAMES_PY[e], NAMES_PY[s], *rest) for n, e, s, *rest in formats)
    return Patch(H, H_END, in_h + H_END), Patch(PY, PY_END, in_py + PY_END)


@dataclasses.dataclass(frozen=True)
class Invented:
    """A format with a quantizer and a recipe. `row`: the format's properties as `rows` takes them, after its name."""

    name: str
    recipe: str
    classes: str  # what the names of its classes begin with
    about: str
    row: tuple[str, str, int, int, str, str, str]

    def patches(self) -> tuple[Patch, ...]:
        scale, block = DTYPES[self.row[1]], self.row[2:4]
        words = {"name": self.classes, "about": self.about, "scale": scale, "block": block}
        quantizer, scaling = f"{self.classes}Quantizer", f"{self.classes}Scaling"
        return (
            *rows((self.name, *self.row)),
            Patch(QUANTIZERS, QUANTIZERS_END, QUANTIZERS_END + QUANTIZER.format(**words)),
            Patch(RECIPES, "    Float8Quantizer,\n", f"    Float8Quantizer,\n    {quantizer},\n"),
            Patch(RECIPES, "DEFAULT_RECIPE: Recipe =", f"{SCALING.format(**words)}DEFAULT_RECIPE: Recipe ="),
            Patch(RECIPES, RECIPES_START, f'{RECIPES_START}    "{self.recipe}": {scaling}(),\n'),
            Patch(FACE, "    Float8Quantizer,\n", f"    Float8Quantizer,\n    {quantizer},\n"),
            Patch(FACE, "    Format,\n", f"    Format,\n    {scaling},\n"),
            Patch(FACE, ALL, f'    "{quantizer}",\n    "{scaling}",\n{ALL}'),
        )

    def size(self) -> tuple[set[str], int]:
        """Returns the files that the patches change, and the number of changed lines."""
        pairs = [(p.old.splitlines(), p.new.splitlines()) for p in self.patches()]
        changed = sum(line[0] in "+-" for old, new in pairs for line in difflib.ndiff(old, new))
        return {p.path for p in self.patches()}, changed


BLOCKS = Invented(
    "invented_e8m0_1x128", "invented-block", "InventedBlock",
    "E4M3 with one E8M0 scale per 128 elements along the reduced axis.",
    ("e4m3", "e8m0", 1, 128, "e8m0_ceil", "transposed", "0.0625"),
)  # fmt: skip
WHOLE_ROWS = Invented(
    "invented_rows", "invented-rows", "InventedRow",
    "E4M3 with one float32 scale for each row of an operand, which a product reduces.",
    ("e4m3", "f32", 1, 0, "divide", "transposed", "0.0625"),
)  # fmt: skip
