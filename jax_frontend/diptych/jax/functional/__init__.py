"""The public verbs: quantize, multiply, norms, activations and permutation on arrays."""
