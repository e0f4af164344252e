"""A small PyTorch training step in FP8: `python examples/torch_train.py`."""

import torch

import diptych.torch as dt
from diptych.common import Float8BlockScaling

torch.manual_seed(0)
model = torch.nn.Sequential(dt.Linear(256, 512), torch.nn.GELU(), dt.Linear(512, 256))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
recipe = Float8BlockScaling()


@torch.compile(fullgraph=True)
def loss_fn(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    with dt.autocast(enabled=True, recipe=recipe):
        return torch.nn.functional.mse_loss(model(x), target)


x = torch.randn(128, 256)
for step in range(20):
    loss = loss_fn(x, x.roll(1, dims=1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 5 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
