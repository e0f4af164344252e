"""The difference of two traces: sites are matched, measured and judged, and the result is shown."""
