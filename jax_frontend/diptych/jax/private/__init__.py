"""What diptych borrows of JAX's private API (`jax._src`). No other room names any of it."""
