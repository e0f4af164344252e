"""The comparison of two traces, which matches sites, measures and judges their distances, and shows the result."""
