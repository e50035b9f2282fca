"""Threads, channels, slots, gate and supervisor. Knows no models and no recipe."""
