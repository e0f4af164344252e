"""The kernels on NumPy arrays: `quantize`, `dequantize`, `gemm`, `amax`, `bias_grad`, `scale_update`, those that move
rows between tokens and experts and multiply groups of them, and the tables behind them.

The same verbs as `diptych.torch` and `diptych.jax`, with the same bits. FP8 and E8M0 payloads are `uint8` arrays here,
because NumPy has no such dtypes; view them as `ml_dtypes` where wanted. E2M1 payloads are bytes of two elements. Arrays
of the byte order that is not this machine's raise DTypeError (a TypeError).

Work on the CPU runs on `get_num_threads()` threads, by default as many as there are processors. `set_num_threads(n)`
takes 1 to 1024 (else ValueError), and threads that are then too many end. A call of the main thread runs the handlers
of signals that come meanwhile; what one raises, such as KeyboardInterrupt, ends the call, whose outputs are then
undefined.
"""

from diptych.core import _core
from diptych.core._arrays import QuantizedArray, amax, bias_grad, dequantize, gemm, quantize, scale_update
from diptych.core._grouped import QuantizedStack, grouped_bias_grad, grouped_gemm, quantize_stack
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
    "unpermute",
    "unpermute_grad",
]
