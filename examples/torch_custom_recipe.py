"""A custom recipe in PyTorch, with delayed scaling: `python examples/torch_custom_recipe.py`."""

import torch

import diptych.torch as dt
from diptych.common import CustomRecipe, Float8Quantizer, MXFP8Quantizer, Quantizer, QuantizerRole


def quantizers(role: QuantizerRole) -> Quantizer | None:
    """Keeps the last layer in high precision; other layers use delayed FP8 forward and MXFP8 in dgrad and wgrad."""
    if role.name == "last":
        return None
    if role.gemm == "fprop":
        return Float8Quantizer(amax_history_len=16)
    return MXFP8Quantizer(fp8_dtype="float8_e5m2" if role.tensor == "grad_output" else "float8_e4m3fn")


torch.manual_seed(0)
model = torch.nn.Sequential(dt.Linear(256, 512), torch.nn.GELU(), dt.Linear(512, 256, name="last"))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
recipe = CustomRecipe(quantizers)

x = torch.randn(128, 256)
for step in range(20):
    with dt.autocast(enabled=True, recipe=recipe):  # one region a step: scales are updated when it is entered
        loss = torch.nn.functional.mse_loss(model(x), x.roll(1, dims=1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 5 == 0:
        print(f"step {step}: loss {loss.item():.4f}")

scales = {k: v.item() for k, v in model.state_dict().items() if k.endswith(".scale")}
print(scales)  # saved and loaded with the parameters
