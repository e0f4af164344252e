"""States of delayed scaling as values that training steps pass on, and how they are returned through gradients."""
