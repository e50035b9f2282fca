"""Formats that DSpark drafters are published in."""
