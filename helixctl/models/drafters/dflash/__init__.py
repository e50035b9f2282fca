"""DFlash: one non-causal forward denoises a whole block (arXiv 2602.06036)."""
