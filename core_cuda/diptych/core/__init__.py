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
kernel_table = _core.kernel_table
reset_calls = _core.reset_calls
build_info = _core.build_info
cuda_info = _core.cuda_info
set_num_threads = _core.set_num_threads
get_num_threads = _core.get_num_threads

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
