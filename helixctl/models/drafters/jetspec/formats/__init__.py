"""Formats that JetSpec drafters are published in."""
