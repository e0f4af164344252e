"""The CUDA kernel of NVFP4, without hardware: whole tensors, and parts with the bytes of the whole tensor."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

import cases
import oracle
from core import runner, simulation
from core.quantize.test_quantize_parts import OFFSET, OPTIONS, SEED, cut

pytestmark = pytest.mark.simulated


@pytest.fixture(scope="module")
def library():
    return simulation.built("nvfp4.cpp", ("cuda/quantize/nvfp4.cu",))


def run(library, x: np.ndarray, want: oracle.Quantized, options: dict) -> dict[str, np.ndarray]:
    be, message = runner.Numpy(), ctypes.create_string_buffer(256)
    out = runner.Outputs(be)
    copies = []
    for side in ("rowwise", "columnwise"):
        for name, dtype in (("data", "uint8"), ("scale_inv", runner.ROWS["nvfp4"]["scale"])):
            copies.append(out.new(f"{side}_{name}", getattr(want, f"{side}_{name}").shape, dtype))
    given = [be.put(a, "float32") for a in (want.amax, want.columnwise_amax)]
    tensors = [be.put(x, x.dtype.name, offset=1), *given, be.put(options["rng"], "int32"), *copies]
    operands = (simulation.Tensor * 8)(*map(simulation.Tensor.of, tensors))
    failed = library.quantize_nvfp4(operands, runner.IDS["nvfp4"], runner.flags(options), message, len(message))
    assert failed == 0, message.value.decode()
    return out.read()


@pytest.mark.parametrize("variant", OPTIONS)
def test_parts_have_the_bytes_of_the_whole_tensor(library, variant):
    for dtype in ("bfloat16",) if "rht" in variant else ("bfloat16", "float16", "float32"):
        shape = (176, 304)
        x = cases.draw(f"simulated-parts-{dtype}", "normal", shape, dtype)
        options = dict.fromkeys(variant, True) | {"rng": oracle.rng_words(SEED, OFFSET)}
        whole = oracle.quantize(x, "nvfp4", **options)
        for row, column, m, k in (
            (0, 0, *shape),
            (0, 0, 16, 304),
            (32, 0, 144, 304),
            (0, 16, 176, 272),
            (48, 144, 80, 160),
        ):
            want = cut(whole, row, column, m, k)
            part = np.ascontiguousarray(x[row : row + m, column : column + k])
            for place in ((row, column, *shape), *([()] if part.shape == shape else [])):
                got = run(library, part, want, options | {"rng": oracle.rng_words(SEED, OFFSET, *place)})
                for name, array in got.items():
                    runner.same_bits(array, getattr(want, name), f"{dtype} {variant} {place} {name}")
