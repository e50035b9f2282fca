"""Plug-ins: one file per metric sink; the file's name is the recipe's sink."""
