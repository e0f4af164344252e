from typing import Any, TypedDict

# A tensor argument: an object with a DLPack C exchange table, or a (buffer, dtype code) pair.
Operand = Any

class FormatTableRow(TypedDict):
    name: str
    element: str
    scale: str
    block_rows: int
    block_cols: int
    rule: str
    scale_layout: str
    columnwise: str
    tolerance: float

class KernelTableRow(TypedDict):
    op: str
    backend: str
    min_arch: int
    formats: list[str]
    level: str
    kernel: str
    note: str
    calls: int

class BuildInfo(TypedDict):
    cuda: bool
    compiler: str
    isa: str
    cuda_toolkit: str
    cuda_archs: str

class CudaInfo(TypedDict):
    archs: list[int]
    cublaslt: str

def amax(x: Operand, out: Operand) -> None: ...
def quantize(
    x: Operand,
    format: int,
    pow2: bool,
    eps: float,
    amax: Operand | None,
    amax_ready: bool,
    rowwise_data: Operand | None,
    rowwise_scale_inv: Operand | None,
    columnwise_data: Operand | None,
    columnwise_scale_inv: Operand | None,
) -> None: ...
def dequantize(data: Operand, scale_inv: Operand, format: int, columnwise: bool, out: Operand) -> None: ...
def gemm(
    a_data: Operand,
    a_scale_inv: Operand,
    a_format: int,
    a_columnwise: bool,
    b_data: Operand,
    b_scale_inv: Operand,
    b_format: int,
    b_columnwise: bool,
    d: Operand,
    c: Operand | None,
    bias: Operand | None,
    workspace: Operand | None,
    alpha: float,
    beta: float,
    fast_accum: bool,
) -> None: ...
def bias_grad(dy: Operand, out: Operand, workspace: Operand | None) -> None: ...
def gemm_workspace_bytes(m: int, n: int, k: int, epilogue: bool) -> int: ...
def bias_grad_workspace_bytes(m: int, n: int) -> int: ...
def format_table() -> list[FormatTableRow]: ...
def dtype_table() -> dict[str, int]: ...
def kernel_table() -> list[KernelTableRow]: ...
def reset_calls() -> None: ...
def gemm_row(
    a_format: int,
    a_columnwise: bool,
    b_format: int,
    b_columnwise: bool,
    m: int,
    n: int,
    k: int,
    out_dtype: str,
    backend: str,
    device_index: int,
) -> int: ...
def set_num_threads(n: int) -> None: ...
def get_num_threads() -> int: ...
def set_isa(name: str) -> None: ...
def build_info() -> BuildInfo: ...
def cuda_info() -> CudaInfo: ...
def set_cublaslt_path(path: str) -> None: ...
def dlpack_layout() -> dict[str, int]: ...
