"""The parts of `examples/torch_llama.py` and `examples/jax_llama.py`; only files named after a framework import one."""
