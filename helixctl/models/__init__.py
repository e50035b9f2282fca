"""The frozen target and the drafters."""
