"""A custom quantized layer of `quantize` and `gemm`, trained compiled: `python examples/quantized_layer.py`."""

import torch

import diptych.torch as dt
from diptych.common import MXFP8Quantizer


class TiedLinear(torch.nn.Module):
    """x @ W.T @ W: both products read one quantized weight, and autograd computes the gradients."""

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(hidden, features) / features**0.5)
        self.quantizer = MXFP8Quantizer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w = dt.quantize(self.weight, self.quantizer)
        h = dt.gemm(dt.quantize(x, self.quantizer), w)  # x @ W.T, from the rowwise copies
        return dt.gemm(dt.quantize(h, self.quantizer), w, trans_b=False)  # h @ W, from w's columnwise copy


torch.manual_seed(0)
model = TiedLinear(256, 128)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)


@torch.compile(fullgraph=True, backend="aot_eager")  # "inductor", where there is a C++ compiler
def loss_of(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(x), x)


x = torch.randn(128, 64) @ torch.randn(64, 256) / 8  # of rank 64: 128 hidden values can hold it
for step in range(30):
    loss = loss_of(x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 5 == 4:
        print(f"step {step}: loss {loss.item():.4f}")
