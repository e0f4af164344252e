"""Calls the products of groups and the quantizing of stacks, as `runner` calls the other ops; and their cases."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import cases
import oracle
from core import runner
from diptych.core import _core
from oracle.grouped import Problem

KINDS = _core.group_kinds()
NATIVE, DECODED, EMULATED = "cuda.grouped_native", "cuda.grouped_decoded", "cuda.grouped_emulated"
PRODUCTS = ("fprop", "dgrad", "wgrad")

# (rows, offsets): no rows, no groups, one of either, ragged, gaps before and after, empty groups, huge ones, aligned
GROUPS: tuple[tuple[int, tuple[int, ...]], ...] = (
    (40, (0, 7, 7, 33, 40)),
    (130, (3, 3, 60, 61, 120)),
    (0, (0, 0, 0)),
    (300, (0, 0, 290, 300)),
    (5, (0,)),
    (256, (0, 128, 128, 256)),
    (1, (0, 1)),
    (64, (20, 20, 20)),
    (384, (0, 256, 256, 384)),
    (272, (16, 48, 112, 112, 256)),
    (150, (1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144)),
)
EXTENTS = ((5, 33), (48, 128), (1, 1), (33, 65), (16, 257), (20, 0), (144, 96), (3, 40))  # (N, K or M)
ALIGNED = ((16, 64), (400, 272), (144, 272), (256, 400), (592, 128), (208, 1040), (48, 1536))  # FP8 tensor cores'


@dataclass(frozen=True)
class Case:
    """One product of groups; `inner` is K, or M of wgrad."""

    a_format: str
    b_format: str
    product: str
    rows: int
    offsets: tuple[int, ...]
    n: int
    inner: int
    alpha: float
    beta: float
    bias_dtype: str | None
    out_dtype: str
    values: str = "normal"

    def __str__(self) -> str:
        where = f"{self.rows} rows {list(self.offsets)} {self.n}x{self.inner}"
        epilogue = f"{self.alpha:g}-{self.beta:g}-{self.bias_dtype}-{self.out_dtype}"
        return (
            f"{self.product} {self.a_format}-{self.b_format} {where} {epilogue} {self.values} "
            f"(DIPTYCH_TEST_SEED={cases.SEED})"
        )

    @property
    def align(self) -> int:
        """Returns the largest alignment that divides all offsets."""
        return next(a for a in (128, 32, 16, 1) if all(at % a == 0 for at in self.offsets))

    def make(self) -> Problem:
        groups, wgrad = len(self.offsets) - 1, self.product == "wgrad"
        a = cases.draw(f"{self}-a", self.values, (self.rows, self.inner), "float32")
        qa = oracle.quantize(a, self.a_format, rowwise=not wgrad, columnwise=wgrad).copy(wgrad)
        shape = {"fprop": (self.n, self.inner), "dgrad": (self.inner, self.n), "wgrad": (self.rows, self.n)}
        columnwise = self.product != "fprop"
        sides = {"rowwise": not columnwise, "columnwise": columnwise}
        made = []
        for g in range(1 if wgrad else max(groups, 1)):
            b = cases.draw(f"{self}-b{g}", self.values, shape[self.product], "float32")
            with np.errstate(all="ignore"):
                b = b * np.float32(2.0 ** (g % 5))
            made.append(oracle.quantize(b, self.b_format, **sides).copy(columnwise))
        copies = made[0] if wgrad else made[:groups]
        p = Problem(
            qa, copies, made[0], self.offsets, self.alpha, self.beta, out_dtype=cases.INPUT_DTYPES[self.out_dtype]
        )
        bias = c = None
        if self.bias_dtype and not wgrad:
            bias = cases.draw(f"{self}-bias", "normal", (groups, self.n), self.bias_dtype)
        if self.beta:
            c = cases.draw(f"{self}-c", "normal", p.shape, self.out_dtype)
        return replace(p, bias=bias, c=c)


def formats(case: Case) -> tuple[str, str]:
    return case.a_format, case.b_format


def suits_native(case: Case, align: int) -> bool:
    """Whether Hopper's FP8 tensor cores have to take a product."""
    a, b = (oracle.FORMATS[f] for f in formats(case))
    divide = a.rule == b.rule == "divide" and a.one_scale == b.one_scale
    reduced = case.rows if case.product == "wgrad" else case.inner
    lines = case.n * np.dtype(cases.INPUT_DTYPES[case.out_dtype]).itemsize % 16 == 0
    whole = lines and reduced % 16 == 0 and min(case.rows, case.n, case.inner) > 0
    return divide and whole and (case.product != "wgrad" or align % (32 if a.one_scale else 128) == 0)


def suits_decoded(case: Case, align: int) -> bool:
    """Whether Hopper's bfloat16 tensor cores have to take a product."""
    whole = min(case.rows, case.n, case.inner) > 0 and (case.product != "wgrad" or align % 16 == 0)
    return formats(case) in cases.DECODED_PAIRS and whole


def expected_kernel(case: Case, *, aligned: bool, align: int) -> str:
    """Returns the kernel that has to run on the first GPU; `aligned`: whether the tensors are."""
    arch = _core.cuda_info()["archs"][0]
    if arch == 90 and aligned and suits_native(case, align):
        return NATIVE
    return DECODED if arch == 90 and suits_decoded(case, align) else EMULATED


def grouped_cases(
    pairs: Sequence[tuple[str, str]],
    groups: Sequence[tuple[int, tuple[int, ...]]] = GROUPS,
    extents: Sequence[tuple[int, int]] = EXTENTS,
    values: Sequence[str] = ("normal",),
    products: Sequence[str] = PRODUCTS,
) -> Iterator[Case]:
    """Every pair x grouping x value set; products, extents and epilogues take turns.

    A packed operand's extents are rounded up to whole blocks.
    """
    block = cases.PACKED_BLOCK
    for start, (a, b) in enumerate(pairs):
        for turn, ((rows, offsets), value) in enumerate(itertools.product(groups, values), start=start):
            product = products[turn % len(products)]
            (n, inner), epilogue = extents[turn % len(extents)], cases.GEMM_EPILOGUES[turn % len(cases.GEMM_EPILOGUES)]
            packed_a, packed_b = a in cases.PACKED_FORMATS, b in cases.PACKED_FORMATS
            if packed_a or (packed_b and product != "wgrad"):
                inner = -(-inner // block) * block
            if packed_b and product != "fprop":
                n = -(-n // block) * block
            if (packed_a or packed_b) and product == "wgrad":
                rows = -(-rows // block) * block
            yield Case(a, b, product, rows, offsets, n, inner, *epilogue, values=value)


def _stack(be: Any, copies: list[oracle.Copy], like: oracle.Copy, fmt: str, offset: int) -> tuple[Any, ...]:
    def together(name: str, whole: bool) -> np.ndarray:
        shape = () if whole else getattr(like, name).shape
        return np.array([getattr(c, name) for c in copies], getattr(like, name).dtype).reshape(len(copies), *shape)

    amax = None
    if like.amax is not None:
        amax = be.put(together("amax", np.size(like.amax) == 1), "float32")
    data = be.put(together("data", False), runner.payload(fmt), offset)
    scale = be.put(together("scale_inv", like.fmt.one_scale), runner.ROWS[fmt]["scale"])
    return data, scale, amax, runner.IDS[fmt], like.columnwise


def _workspace_bytes(p: Problem, formats: tuple[str, str]) -> int:
    ids = (runner.IDS[f] for f in formats)
    kind = KINDS["depth" if p.depth else "rows"]
    return _core.grouped_gemm_workspace_bytes(
        *ids, kind, *p.shape[-2:], p.a.shape[0 if p.depth else 1], len(p.offsets) - 1
    )


def arguments(be: Any, p: Problem, formats: tuple[str, str], out: runner.Outputs, offset: int = 0) -> dict[str, Any]:
    """Returns the arguments of `_core.grouped_gemm`."""
    names = ("data", "scale_inv", "amax", "format", "columnwise")
    a = runner.copy_operands(be, p.a, formats[0], offset)
    if isinstance(p.b, list):
        b = _stack(be, p.b, p.like, formats[1], offset)
    else:
        b = runner.copy_operands(be, p.b, formats[1], offset)
    more = {n: None if x is None else be.put(x, x.dtype.name) for n, x in (("c", p.c), ("bias", p.bias))}
    return {
        **{f"a_{n}": v for n, v in zip(names, a, strict=True)},
        **{f"b_{n}": v for n, v in zip(names, b, strict=True)},
        "offsets": be.put(np.array(p.offsets, np.int32), "int32"),
        "d": out.new("d", p.shape, np.dtype(p.out_dtype).name),
        **more,
        "workspace": out.workspace(_workspace_bytes(p, formats)),
        "kind": KINDS["depth" if p.depth else "rows"],
        "align": 1,
        "rotated": False,
        "alpha": p.alpha,
        "beta": p.beta,
        "fast_accum": False,
    }


def grouped_gemm(
    be: Any, p: Problem, formats: tuple[str, str], *, offset: int = 0, poison: int = runner.POISON, **changes: Any
) -> np.ndarray:
    out = runner.Outputs(be, poison, offset)
    _core.grouped_gemm(**{**arguments(be, p, formats, out, offset), **changes})
    return out.read()["d"]


def quantize_stack(
    be: Any, x: np.ndarray, like: oracle.Quantized, fmt: str, *, offset: int = 0, poison: int = runner.POISON,
    accumulate: np.ndarray | None = None, **options: Any,
) -> dict[str, np.ndarray]:  # fmt: skip
    """`_core.quantize` of a stack. `like`: the result for one of its tensors. Other arguments are stacks too."""
    out, row, groups = runner.Outputs(be, poison, offset), runner.ROWS[fmt], len(x)
    dtypes = {"data": runner.payload(fmt), "scale_inv": row["scale"]}
    whole = {"scale_inv"} if row["block_cols"] == 0 else set()
    buffers: dict[str, Any] = {}
    for side, part in itertools.product(("rowwise", "columnwise"), dtypes):
        name = f"{side}_{part}"
        array = getattr(like, name)
        shape = None if array is None else (groups, *(() if part in whole else array.shape))
        buffers[name] = None if shape is None else out.new(name, shape, dtypes[part])
    given = any(options.get(name) is not None for name in ("amax", "columnwise_amax"))
    for name in ("amax", "columnwise_amax"):
        array = getattr(like, name)
        if array is None:
            buffers[name] = None
        elif given:
            buffers[name] = be.put(np.asarray(options[name], np.float32), "float32")
        else:
            shape = (groups,) if array.size == 1 else (groups, array.size)
            buffers[name] = out.new(name, shape, "float32", accumulate)
    for name, dtype in (("scale", np.float32), ("rng", np.int32)):
        value = options.get(name)
        buffers[name] = None if value is None else be.put(np.asarray(value, dtype), np.dtype(dtype).name)
    mode = runner.GIVEN if given else runner.COMPUTE if accumulate is None else runner.ACCUMULATE
    _core.quantize(
        be.put(x, x.dtype.name, offset),
        format=runner.IDS[fmt],
        flags=runner.flags(options),
        eps=options.get("eps", 0.0),
        amax_mode=mode,
        **buffers,
        stack=True,
    )
    return out.read()
