"""Plain and speculative decoding."""
