"""Everything that a new block format needs, as patches: its rows, its quantizer, its recipe and their public names.

The format is E4M3 in blocks of 1x128 with E8M0 scales. Kernels already support its block, its element and its scale
rule in other formats, so layers, frontends and kernels need no change.
"""

from __future__ import annotations

import difflib

from architecture.variants import Patch

FORMAT, RECIPE = "invented_e8m0_1x128", "invented-block"

QUANTIZER = '''

@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class InventedBlockQuantizer(_BuiltIn):
    """E4M3 with one E8M0 scale per 1x128 block."""

    @functools.cached_property
    def format(self) -> FormatRow:
        return find_format("float8_e4m3fn", "float8_e8m0fnu", (1, 128))
'''
SCALING = '''@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class InventedBlockScaling(Recipe):
    """E4M3 everywhere, one E8M0 scale per 128 elements along the reduced axis."""

    def quantizer(self, role: QuantizerRole) -> Quantizer | None:
        return None if role.tensor in role.RESULTS else InventedBlockQuantizer()


'''
H, PY = "core_cuda/include/diptych/format.h", "common/diptych/common/formats.py"
QUANTIZERS, RECIPES = "common/diptych/common/quantizers.py", "common/diptych/common/recipes.py"
FACE = "common/diptych/common/__init__.py"
H_END = "};\n// clang-format on\ninline constexpr int32_t kFormatCount"
PY_END = ")\n# fmt: on"
QUANTIZERS_END = "        return QuantSpec(self.format.id, flags, 0.0)\n"
RECIPES_END, ALL = '}\n"""The recipes with', '    "LateStateWarning",\n'
ROW_H = '    {"%s", DType::%s, DType::%s, %d, %d, ScaleRule::%s, ColumnwiseLayout::%s, %sf},\n'
ROW_PY = '    FormatRow("%s", %s, %s, %d, %d, "%s", "%s", %s),\n'
NAMES_PY = {"e5m2": "_E5M2", "e4m3": "_E4M3", "f32": "_F32", "e8m0": "_E8M0"}


def rows(*formats: tuple[str, str, str, int, int, str, str, str]) -> tuple[Patch, Patch]:
    """Returns patches that append formats to both tables: name, element, scale, block, rule, columnwise, tolerance."""
    in_h = "".join(ROW_H % row for row in formats)
    in_py = "".join(ROW_PY % (n, NAMES_PY[e], NAMES_PY[s], *rest) for n, e, s, *rest in formats)
    return Patch(H, H_END, in_h + H_END), Patch(PY, PY_END, in_py + PY_END)


PATCHES = (
    *rows((FORMAT, "e4m3", "e8m0", 1, 128, "e8m0_ceil", "transposed", "0.0625")),
    Patch(QUANTIZERS, QUANTIZERS_END, QUANTIZERS_END + QUANTIZER),
    Patch(RECIPES, "    Float8Quantizer,\n", "    Float8Quantizer,\n    InventedBlockQuantizer,\n"),
    Patch(RECIPES, "DEFAULT_RECIPE: Recipe =", f"{SCALING}DEFAULT_RECIPE: Recipe ="),
    Patch(RECIPES, RECIPES_END, f'    "{RECIPE}": InventedBlockScaling(),\n{RECIPES_END}'),
    Patch(FACE, "    Float8Quantizer,\n", "    Float8Quantizer,\n    InventedBlockQuantizer,\n"),
    Patch(FACE, "    Format,\n", "    Format,\n    InventedBlockScaling,\n"),
    Patch(FACE, ALL, f'    "InventedBlockQuantizer",\n    "InventedBlockScaling",\n{ALL}'),
)  # fmt: skip


def size() -> tuple[set[str], int]:
    """Returns the files that the patches change, and the number of changed lines."""
    pairs = [(p.old.splitlines(), p.new.splitlines()) for p in PATCHES]
    return {p.path for p in PATCHES}, sum(line[0] in "+-" for old, new in pairs for line in difflib.ndiff(old, new))
