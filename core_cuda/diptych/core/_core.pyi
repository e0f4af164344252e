# Written by `make stub`.

"""diptych's kernels on borrowed tensors. The caller allocates outputs.

An Operand is a tensor: an object with a DLPack C exchange table, or a pair (buffer, dtype code)."""

import collections.abc
import typing

Operand = typing.Any

class BuildInfo(typing.TypedDict):
    cuda: bool
    compiler: str
    isa: str
    cuda_toolkit: str
    cuda_archs: str

class CudaInfo(typing.TypedDict):
    archs: list[int]
    cublaslt: str

def amax(
    x: Operand,
    out: Operand,
    columnwise_out: Operand | None,
    flags: int,
    source: tuple[int, int, bool, Operand | None, Operand | None, Operand | None, Operand | None, Operand | None]
    | tuple[int, Operand, Operand]
    | None = None,
) -> None:
    """source is as in quantize."""

def quantize(
    x: Operand,
    format: int,
    flags: int,
    eps: float,
    amax_mode: int,
    amax: Operand | None,
    columnwise_amax: Operand | None,
    scale: Operand | None,
    rng: Operand | None,
    rowwise_data: Operand | None,
    rowwise_scale_inv: Operand | None,
    columnwise_data: Operand | None,
    columnwise_scale_inv: Operand | None,
    source: tuple[int, int, bool, Operand | None, Operand | None, Operand | None, Operand | None, Operand | None]
    | tuple[int, Operand, Operand]
    | None = None,
    column_sum: Operand | None = None,
    workspace: Operand | None = None,
    stack: bool = False,
) -> None:
    """amax_mode: 0 computes amaxes from x, 1 reads them, 2 writes the larger of x's and the buffer's content.
    source: (kind, norm or activation, zero_centered_gamma or gated, gamma, beta, mu, rsigma, dy), or for permuted
    rows (kind, row_id_map, row_source). fused_table() lists the numbers.
    stack: x is a stack of G tensors, and every other tensor has a leading G too."""

def quantize_many(
    calls: collections.abc.Sequence[tuple[typing.Any, ...]], format: int, flags: int, eps: float, amax_mode: int
) -> None:
    """Quantizes many tensors of one dtype. A call: (x, amax, columnwise_amax, scale, rng, rowwise_data,
    rowwise_scale, columnwise_data, columnwise_scale), as for quantize."""

def dequantize(
    data: Operand, scale_inv: Operand, amax: Operand | None, format: int, columnwise: bool, out: Operand
) -> None: ...
def column_sum_workspace_bytes(m: int, k: int) -> int: ...
def scale_update(
    history: Operand,
    scale: Operand,
    reduced: Operand | None,
    amax: Operand | None,
    new_history: Operand,
    new_scale: Operand,
    fp8_max: float,
    margin: int,
    most_recent: bool,
    seen: Operand | None = None,
    step: Operand | None = None,
    pending: Operand | None = None,
    log: Operand | None = None,
    written: Operand | None = None,
    taken: Operand | None = None,
    scale_out: Operand | None = None,
) -> None: ...
def scale_update_many(calls: collections.abc.Sequence[tuple[typing.Any, ...]]) -> None:
    """Updates many histories and scales in place. A call: (history, scale, reduced, amax, fp8_max, margin,
    most_recent, seen, step, pending, log, written, taken, scale_out), as for scale_update."""

def log_amax(amax: Operand, log: Operand, written: Operand) -> None: ...
def gemm(
    a_data: Operand,
    a_scale_inv: Operand,
    a_amax: Operand | None,
    a_format: int,
    a_columnwise: bool,
    b_data: Operand,
    b_scale_inv: Operand,
    b_amax: Operand | None,
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
def gemm_workspace_bytes(a_format: int, b_format: int, m: int, n: int, k: int, epilogue: bool) -> int: ...
def bias_grad_workspace_bytes(m: int, n: int) -> int: ...
def norm(
    x: Operand,
    gamma: Operand | None,
    beta: Operand | None,
    mu: Operand | None,
    rsigma: Operand,
    y: Operand | None,
    norm: int,
    eps: float,
    zero_centered_gamma: bool,
) -> None: ...
def norm_grad(
    dy: Operand,
    x: Operand,
    gamma: Operand,
    mu: Operand | None,
    rsigma: Operand,
    dx: Operand,
    dgamma: Operand,
    dbeta: Operand | None,
    workspace: Operand | None,
    norm: int,
    zero_centered_gamma: bool,
) -> None: ...
def norm_grad_workspace_bytes(m: int, k: int) -> int: ...
def activation(x: Operand, y: Operand, kind: int, gated: bool) -> None: ...
def activation_grad(dy: Operand, x: Operand, dx: Operand, kind: int, gated: bool) -> None: ...
def permute_map(
    routing: Operand,
    kind: int,
    align: int,
    row_id_map: Operand,
    tokens_per_expert: Operand,
    expert_offsets: Operand,
    row_source: Operand,
    workspace: Operand | None,
) -> None:
    """kind is a number from moe_table()['routing_map']."""

def chunk_map(split_sizes: Operand, order: Operand, row_id_map: Operand, row_source: Operand) -> None: ...
def invert_map(row_id_map: Operand, row_source: Operand, kept: Operand | None = None) -> None: ...
def permute(
    planes: collections.abc.Sequence[tuple[Operand, Operand, int]],
    row_id_map: Operand,
    row_source: Operand,
    probs: Operand | None = None,
    permuted_probs: Operand | None = None,
    zero_prob_is_padding: bool = False,
) -> None:
    """planes holds (input, output, fill) for each tensor; absent rows repeat the four bytes of fill."""

def permute_columns(x: Operand, out: Operand, row_source: Operand, slots: int) -> None: ...
def unpermute(
    x: Operand,
    row_id_map: Operand,
    probs: Operand | None,
    y: Operand,
    permuted_dprobs: Operand | None = None,
    dprobs: Operand | None = None,
) -> None: ...
def unpermute_grad(
    dy: Operand,
    row_id_map: Operand,
    row_source: Operand,
    probs: Operand,
    dx: Operand,
    x: Operand | None = None,
    dprobs: Operand | None = None,
) -> None: ...
def permute_map_workspace_bytes(kind: int, items: int, experts: int) -> int: ...

class MoeTable(typing.TypedDict):
    routing_map: dict[str, int]
    max_slots: int
    max_planes: int

def moe_table() -> MoeTable: ...
def grouped_gemm(
    a_data: Operand,
    a_scale_inv: Operand,
    a_amax: Operand | None,
    a_format: int,
    a_columnwise: bool,
    b_data: Operand,
    b_scale_inv: Operand,
    b_amax: Operand | None,
    b_format: int,
    b_columnwise: bool,
    offsets: Operand,
    d: Operand,
    c: Operand | None,
    bias: Operand | None,
    workspace: Operand | None,
    kind: int,
    align: int,
    rotated: bool,
    alpha: float,
    beta: float,
    fast_accum: bool,
) -> None:
    """kind is a number from group_kinds()."""

def grouped_gemm_workspace_bytes(a_format: int, b_format: int, kind: int, m: int, n: int, k: int, groups: int) -> int:
    """kind is a number from group_kinds()."""

def grouped_bias_grad(dy: Operand, offsets: Operand, out: Operand, workspace: Operand | None) -> None: ...
def grouped_bias_grad_workspace_bytes(rows: int, cols: int, groups: int) -> int: ...
def group_kinds() -> dict[str, int]: ...
def transpose(x: Operand, out: Operand) -> None: ...
def hash(x: Operand, out: Operand) -> None: ...
def statistics(
    x: Operand,
    result: Operand | None,
    largest: Operand | None,
    out: Operand,
    workspace: Operand | None,
    number: int,
    beyond: float,
) -> None: ...
def number_table() -> dict[str, int]:
    """The numbers by which `statistics` knows dtypes."""

def statistics_workspace_bytes() -> int: ...

class FormatTableRow(typing.TypedDict):
    name: str
    element: str
    scale: str
    block_rows: int
    block_cols: int
    rule: str
    columnwise: str
    tolerance: float

class KernelTableRow(typing.TypedDict):
    op: str
    backend: str
    min_arch: int
    max_arch: int
    formats: list[str]
    level: str
    kernel: str
    note: str
    conditional: bool
    calls: int

def fused_table() -> dict[str, dict[str, int]]: ...
def format_table() -> list[FormatTableRow]: ...
def dtype_table() -> dict[str, int]: ...
def flag_table() -> dict[str, int]: ...
def kernel_table() -> list[KernelTableRow]: ...
def reset_calls() -> None: ...
def switch_kernel(kernel: str, on: bool) -> None:
    """Lets no call of this process run a kernel, or lets calls run it again. Raises ValueError for an unknown name."""

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
    fast_accum: bool = False,
) -> int:
    """Returns the index in kernel_table() of the row that would run this product, or -1. Reads no tensor."""

class Program:
    """Records the core's ops between start() and stop(), and runs them again on other tensors of the same forms."""

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def seal(
        self,
        inputs: list[Operand],
        outputs: list[Operand],
        scratch: list[Operand],
        views: list[tuple[Operand, Operand, int]],
        makers: list[tuple[collections.abc.Callable[..., Operand], tuple[int, ...]]],
        make_workspace: collections.abc.Callable[[int], Operand],
    ) -> bool: ...
    def run(self, inputs: list[Operand]) -> list[Operand] | None: ...

def set_num_threads(n: int) -> None: ...
def get_num_threads() -> int: ...
def set_isa(name: str) -> None: ...
def build_info() -> BuildInfo: ...
def cuda_info() -> CudaInfo: ...
def set_cublaslt_path(path: str) -> None: ...
def dlpack_layout() -> dict[str, int]: ...
