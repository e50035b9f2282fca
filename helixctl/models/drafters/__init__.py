"""Plug-ins: one folder per drafter algorithm; the folder's name is the recipe's drafter.algorithm."""
