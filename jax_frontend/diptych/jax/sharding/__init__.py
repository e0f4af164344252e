"""How the primitives are partitioned under `jax.jit`: `rule` says what may be cut, `partition` tells XLA."""
