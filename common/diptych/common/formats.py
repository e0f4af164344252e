"""The format table, twin of the core's `format.h`. The panels read all properties of a format from its fields here.

Invariants: a row's position is its id in every binding; a test compares this table with `diptych.core.format_table()`.
A new format needs a row here, a row in `format.h`, a codec if the element is new, registry rows and a recipe.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class FormatRow:
    """One format.

    `element` and `scale` are dtype names as in torch, jax and ml_dtypes. A rowwise block has `block_rows x block_cols`
    elements, where 0 stands for the tensor's whole extent: (0, 0) is the whole tensor, (1, 0) a whole row. `rule` is
    how a scale follows from its amax: "divide" (float32 division), "e8m0_ceil" (power of two, rounded up) or
    "two_level" (E4M3, relative to an amax of the tensor or row, which is stored with the copy). `columnwise` is the
    layout of the columnwise copy of an [M, K] tensor: "transposed" ([K, M]) or "row_major" ([M, K]). `tolerance` is the
    relative error of one round trip of a normal value: half an ulp of the element.
    """

    name: str
    element: str
    scale: str
    block_rows: int
    block_cols: int
    rule: str
    columnwise: str
    tolerance: float

    @property
    def one_scale(self) -> bool:
        """Whether the whole tensor has one scale. Its scales are [1], and a call may give the scale."""
        return self.block_rows == self.block_cols == 0

    @property
    def tensor_amax(self) -> bool:
        """Whether quantizing reads an amax of the whole tensor, or of a row, which is returned with the copies."""
        return self.one_scale or self.two_level

    def block(self, columnwise: bool) -> tuple[int, int]:
        """Returns the rows and columns of the [M, K] tensor that share a scale of one copy; 0: all of them."""
        return (self.block_cols, self.block_rows) if columnwise else (self.block_rows, self.block_cols)

    @property
    def two_level(self) -> bool:
        return self.rule == "two_level"

    @property
    def pack(self) -> int:
        """Elements in a byte of the payload. Packed formats take whole blocks only."""
        return 2 if self.element == "float4_e2m1fn" else 1

    @property
    def data(self) -> str:
        """Dtype of the payload: the element's, or uint8 if packed, with the even element in the low bits."""
        return "uint8" if self.pack == 2 else self.element

    @property
    def id(self) -> int:
        """Position in the table, which is also the format's number in the core."""
        return _IDS[self.name]


_E4M3, _E5M2 = "float8_e4m3fn", "float8_e5m2"
_E2M1 = "float4_e2m1fn"
_F32, _E8M0 = "float32", "float8_e8m0fnu"

# fmt: off
FORMATS: tuple[FormatRow, ...] = (
    #          name                element scale  block      rule         columnwise    tolerance
    FormatRow("fp8_e4m3_tensor",   _E4M3, _F32,    0,   0, "divide",    "transposed", 0.0625),
    FormatRow("fp8_e5m2_tensor",   _E5M2, _F32,    0,   0, "divide",    "transposed", 0.125),
    FormatRow("fp8_e4m3_1x128",    _E4M3, _F32,    1, 128, "divide",    "transposed", 0.0625),
    FormatRow("fp8_e5m2_1x128",    _E5M2, _F32,    1, 128, "divide",    "transposed", 0.125),
    FormatRow("fp8_e4m3_128x128",  _E4M3, _F32,  128, 128, "divide",    "transposed", 0.0625),
    FormatRow("fp8_e5m2_128x128",  _E5M2, _F32,  128, 128, "divide",    "transposed", 0.125),
    FormatRow("mxfp8_e4m3",        _E4M3, _E8M0,   1,  32, "e8m0_ceil", "row_major",  0.0625),
    FormatRow("mxfp8_e5m2",        _E5M2, _E8M0,   1,  32, "e8m0_ceil", "row_major",  0.125),
    FormatRow("nvfp4",             _E2M1, _E4M3,   1,  16, "two_level", "transposed", 0.25),
)
# fmt: on
"""The formats, in the order of the core's table; a row's place is the format's number in the core."""

_IDS = {row.name: i for i, row in enumerate(FORMATS)}


def find_format(element: str, scale: str, block: tuple[int, int]) -> FormatRow:
    """The row with these properties.

    **Raises** ValueError naming the rows with that block, or all rows, when there is none.
    """
    for row in FORMATS:
        if (row.element, row.scale, (row.block_rows, row.block_cols)) == (element, scale, block):
            return row
    near = [r.name for r in FORMATS if (r.block_rows, r.block_cols) == block] or [r.name for r in FORMATS]
    raise ValueError(f"no format with element {element}, scale {scale}, block {block}; nearest: {', '.join(near)}")


def format_by_name(name: str) -> FormatRow:
    """The row called `name`. **Raises** ValueError with the known names."""
    if name not in _IDS:
        raise ValueError(f"unknown format {name!r}; known: {', '.join(_IDS)}")
    return FORMATS[_IDS[name]]


LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "float4_e2m1fn": 6.0}
"""The largest finite value of each element."""
