"""Linear layers as functions: which products run on which operands."""
