"""A custom recipe in JAX, with delayed scaling: `python examples/jax_custom_recipe.py`."""

import jax
import jax.numpy as jnp
import optax

import diptych.jax as dj
from diptych.common import CustomRecipe, Float8Quantizer, MXFP8Quantizer, Quantizer, QuantizerRole


def quantizers(role: QuantizerRole) -> Quantizer | None:
    """Keeps the last layer in high precision; other layers use delayed FP8 forward and MXFP8 in dgrad and wgrad."""
    if role.name == "last":
        return None
    if role.gemm == "fprop":
        return Float8Quantizer(amax_history_len=16)
    return MXFP8Quantizer(fp8_dtype="float8_e5m2" if role.tensor == "grad_output" else "float8_e4m3fn")


recipe = CustomRecipe(quantizers)


def loss_fn(params, states, x, target):
    hidden = jax.nn.gelu(dj.dense(x, params["up"], recipe=recipe, state=states["up"]))
    return jnp.mean((dj.dense(hidden, params["down"], recipe=recipe, name="last") - target) ** 2)


optimizer = optax.adamw(1e-3)


@jax.jit
def train_step(params, states, opt_state, x, target):
    states = dj.update_state(states)  # once a step
    loss, grads, states = dj.value_and_grad_with_state(loss_fn)(params, states, x, target)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), states, opt_state, loss


a, b, c = jax.random.split(jax.random.key(0), 3)
params = {"up": jax.random.normal(a, (512, 256)) / 16, "down": jax.random.normal(b, (256, 512)) / 23}
states = {"up": dj.init_state(recipe)}
opt_state = optimizer.init(params)
x = jax.random.normal(c, (128, 256))
for step in range(20):
    params, states, opt_state, loss = train_step(params, states, opt_state, x, jnp.roll(x, 1, axis=1))
    if step % 5 == 0:
        print(f"step {step}: loss {loss:.4f}")

print({name: s.scale.item() for name, s in states["up"].items()})
