"""A custom op, which is one graph node forward and one backward: `python examples/custom_op.py`."""

import dataclasses

import torch
from torch import Tensor

import diptych.torch as dt
from diptych.common import Float8CurrentScalingQuantizer, Quantizer


@dataclasses.dataclass
class Squared:
    """relu(x)^2, of which backward keeps an FP8 copy of relu(x) instead of x."""

    x: Tensor
    quantizer: Quantizer


def forward(a: Squared, needs: tuple[str, ...]) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    r = a.x.relu()
    if not needs:
        return (r * r,), []
    q = dt.quantize(r, a.quantizer)
    return (r * r,), [q.rowwise_data, q.rowwise_scale_inv, q.amax]


def layout(a: Squared, needs: tuple[str, ...]) -> tuple[dt.TensorProto, ...]:
    return (dt.to_tensor_proto(a.x, requires_grad=bool(needs)),)


def backward(a: Squared, needs: tuple[str, ...], saved: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
    # x was not kept: here a.x is its TensorProto, which knows shape and dtype.
    names = a.quantizer.buffer_names()
    q = dt.QuantizedTensor(a.quantizer, a.x.shape, a.x.dtype, **dict(zip(names, saved, strict=True)))
    return [2 * grads[0] * q.dequantize()]


squared = dt.CustomOp("examples::squared_relu", Squared, forward, layout, backward)
QUANTIZER = Float8CurrentScalingQuantizer(columnwise=False)

torch.manual_seed(0)
first, second = torch.nn.Linear(128, 256), torch.nn.Linear(256, 128)
optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters()], lr=3e-3)


@torch.compile(fullgraph=True, backend="aot_eager")  # "inductor", where there is a C++ compiler
def loss_of(x: Tensor) -> Tensor:
    (h,) = squared(Squared(first(x), QUANTIZER))
    return torch.nn.functional.mse_loss(second(h), x.roll(1, dims=1))


x = torch.randn(64, 128)
for step in range(30):
    loss = loss_of(x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 5 == 4:
        print(f"step {step}: loss {loss.item():.4f}")
