"""DSpark (arXiv 2607.05147): shifted labels, a small sequential head and a confidence head on the DFlash backbone."""
