"""The parts of `examples/torch_llama.py`."""
