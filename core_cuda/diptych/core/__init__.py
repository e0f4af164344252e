"""The core's verbs on NumPy arrays: `quantize`, `dequantize`, `gemm`, `amax`, `bias_grad`, `scale_update`, the verbs
that permute rows between tokens and experts and multiply groups of rows, `hash`, `statistics`, and the tables of
formats and kernels.

The same verbs as `diptych.torch` and `diptych.jax`, with the same bits. FP8 and E8M0 payloads are `uint8` arrays here,
because NumPy has no such dtypes; view them as `ml_dtypes` if needed. E2M1 payloads hold two elements in a byte. Arrays
in another byte order than this machine's raise DTypeError (a TypeError).

The CPU kernels run on `get_num_threads()` threads, by default as many as there are processors. `set_num_threads(n)`
takes 1 to 1024 (else ValueError) and ends surplus threads. During a call, the main thread runs the handlers of signals
that arrive; an exception that one raises, such as KeyboardInterrupt, ends the call and leaves its outputs undefined.
"""

from diptych.core import _core
from diptych.core._arrays import QuantizedArray, amax, bias_grad, dequantize, gemm, quantize, scale_update
from diptych.core._grouped import QuantizedStack, grouped_bias_grad, grouped_gemm, quantize_stack
from diptych.core._hash import hash
from diptych.core._permute import (
    RowMap,
    chunk_map,
    invert_map,
    permute,
    permute_map,
    permute_quantize,
    unpermute,
    unpermute_grad,
)
from diptych.core._statistics import statistics

format_table = _core.format_table
"""Returns the rows of the format table: a list of dicts with the fields of `FormatRow`."""

kernel_table = _core.kernel_table
"""Returns the rows of the kernel table: a list of dicts with `op`, `backend` ("cpu" or "cuda"), `min_arch` and
`max_arch`, `formats`, `level` ("native" or "emulated"), `kernel`, `note`, and `calls`, the number of calls in this
process. Of the rows that take a call's operands the first one runs."""

reset_calls = _core.reset_calls
"""Sets the numbers of calls in the kernel table to 0."""

build_info = _core.build_info
"""Returns how the core was built: a dict with `cuda`, `compiler`, `isa` (the instruction set that runs here),
`cuda_toolkit` and `cuda_archs`."""

cuda_info = _core.cuda_info
"""Returns a dict with the architectures of this machine's GPUs (`archs`) and the cuBLASLt that was loaded."""

set_num_threads = _core.set_num_threads
"""Sets the number of threads of the CPU kernels, 1 to 1024. Results do not depend on it. Raises ValueError for another
number."""

get_num_threads = _core.get_num_threads
"""Returns the number of threads of the CPU kernels."""

__all__ = [
    "QuantizedArray",
    "QuantizedStack",
    "RowMap",
    "amax",
    "bias_grad",
    "build_info",
    "chunk_map",
    "cuda_info",
    "dequantize",
    "format_table",
    "gemm",
    "get_num_threads",
    "grouped_bias_grad",
    "grouped_gemm",
    "hash",
    "invert_map",
    "kernel_table",
    "permute",
    "permute_map",
    "permute_quantize",
    "quantize",
    "quantize_stack",
    "reset_calls",
    "scale_update",
    "set_num_threads",
    "statistics",
    "unpermute",
    "unpermute_grad",
]
