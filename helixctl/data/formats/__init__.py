"""Plug-ins: one file per dataset format; the file's name is the recipe's format."""
