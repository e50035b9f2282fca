"""Compiling ahead of a run: ``helixctl warmup-compile``."""
