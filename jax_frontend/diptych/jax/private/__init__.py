"""The names of JAX's private API (`jax._src`) that diptych uses. No other room names any of it."""
