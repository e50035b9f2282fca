"""JetSpec (arXiv 2606.18394): the DFlash backbone with causal blocks, trained on the target's whole distribution."""
