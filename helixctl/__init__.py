"""helixctl trains drafters for speculative decoding, and small causal language models."""
