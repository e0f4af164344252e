"""amax_group: two processes that each hold half of the rows get the bits of one that holds them all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = """
import sys

import torch
import torch.distributed as dist

import diptych.torch as dt
from diptych.common import Float8CurrentScalingQuantizer, NVFP4Quantizer, Quantizer
from diptych.torch.functional.amax_group import max_over
from diptych.torch.tensors.quantized import BUFFERS

rank, file = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
torch.manual_seed(0)
ROWS, K = 64, 96
X = torch.randn(ROWS, K).to(torch.bfloat16)
X[3] *= 50  # the first rank has the larger amax
X[ROWS // 2 :, 5] *= 0.01
mine = slice(rank * ROWS // 2, (rank + 1) * ROWS // 2)


class Custom(Quantizer):
    @property
    def format(self):
        return Float8CurrentScalingQuantizer().format

    def quantize_impl(self, x, quantize):
        return quantize(x * 2, Float8CurrentScalingQuantizer(rowwise=self.rowwise, columnwise=self.columnwise))


def same(got, want, label):
    for name in BUFFERS:
        g, w = getattr(got, name), getattr(want, name)
        assert (g is None) == (w is None), (label, name)
        if g is None:
            continue
        if w.numel() > 1 and name.startswith("columnwise"):
            w = w.unflatten(-1, (2, -1))[..., rank, :]
        elif w.numel() > 1:
            w = w.unflatten(0, (2, -1))[rank]
        assert torch.equal(g.view(torch.uint8), w.contiguous().view(torch.uint8)), (label, name)


quantizers = [Float8CurrentScalingQuantizer(fp8_dtype="float8_e5m2", force_pow_2_scales=True), Custom()]
for usage in ({}, {"rowwise": False}, {"columnwise": False}):
    quantizers.append(Float8CurrentScalingQuantizer(**usage))
    for options in ({}, {"with_2d_quantization": True}, {"with_rht": True}, {"row_scaled_nvfp4": True},
                    {"row_scaled_nvfp4": True, "with_rht": True, "with_random_sign_mask": False}):
        quantizers.append(NVFP4Quantizer(**usage, **options))
group = dist.new_group([0, 1])
for quantizer in quantizers:
    want = dt.quantize(X, quantizer)
    same(dt.quantize(X[mine], quantizer, amax_group=dist.group.WORLD), want, quantizer)
    same(dt.quantize(X[mine], quantizer, amax_group=group), want, quantizer)
for quantizer in (quantizers[0], quantizers[1], quantizers[-1], NVFP4Quantizer(), NVFP4Quantizer(with_rht=True)):
    torch._dynamo.reset()
    step = torch.compile(
        lambda x: dt.quantize(x, quantizer, amax_group=group), fullgraph=True, dynamic=False, backend="aot_eager"
    )
    same(step(X[mine]), dt.quantize(X, quantizer), quantizer)

# Where one has nothing, or numbers that a flush to zero would lose
empty = X[mine] if rank else X[:0]
same_amax = dt.quantize(empty, Float8CurrentScalingQuantizer(), amax_group=group).amax
assert torch.equal(same_amax, dt.amax(X[ROWS // 2 :]))
torch.set_flush_denormal(True)
tiny = torch.tensor([3 + rank, 5 - rank], dtype=torch.int32).view(torch.float32)
assert max_over(tiny, group).view(torch.int32).tolist() == [4, 5]
torch.set_flush_denormal(False)

# Delayed scaling reduces what is pending, at the update
for compiled in (False, True):
    history, scale = torch.zeros(4), torch.ones(1)
    history[0] = dt.amax(X[mine])[0]

    def update(history, scale):
        dt.scale_update(history, scale, reduced=max_over(history[:1], group))

    (torch.compile(update, fullgraph=True, backend="aot_eager") if compiled else update)(history, scale)
    assert history.tolist() == [0, 0, 0, float(dt.amax(X))] and scale[0] == 448 / dt.amax(X)[0]
dist.destroy_process_group()
print("fine")
"""


@pytest.mark.slow  # test_linear_groups runs layers in two processes each time
@pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="torch has no gloo"
)
def test_two_processes_are_one(tmp_path: Path):
    script = tmp_path / "rank.py"
    script.write_text(SCRIPT)
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(tmp_path / "rendezvous")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        results = [process.communicate(timeout=300) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    for out, err in results:
        assert "fine" in out, err
