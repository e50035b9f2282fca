"""The optimizer loop and the only place that wires stages together."""
