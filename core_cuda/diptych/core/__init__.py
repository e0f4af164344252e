"""The kernels on NumPy arrays: `quantize`, `dequantize`, `gemm`, `amax`, `bias_grad`, `scale_update`, and the tables
behind them.

The same verbs as `diptych.torch` and `diptych.jax`, with the same bits. FP8 and E8M0 payloads are `uint8` arrays here,
because NumPy has no such dtypes; view them as `ml_dtypes` where wanted. E2M1 payloads are bytes of two elements.
"""

from diptych.core import _core
from diptych.core._numpy import QuantizedArray, amax, bias_grad, dequantize, gemm, quantize, scale_update

format_table = _core.format_table
kernel_table = _core.kernel_table
reset_calls = _core.reset_calls
build_info = _core.build_info
cuda_info = _core.cuda_info
set_num_threads = _core.set_num_threads
get_num_threads = _core.get_num_threads

__all__ = [
    "QuantizedArray",
    "amax",
    "bias_grad",
    "build_info",
    "cuda_info",
    "dequantize",
    "format_table",
    "gemm",
    "get_num_threads",
    "kernel_table",
    "quantize",
    "reset_calls",
    "scale_update",
    "set_num_threads",
]
