"""Atomic checkpoints and exports."""
