"""Meters, metric names and sinks."""
