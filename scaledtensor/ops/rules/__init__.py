"""The rules: one file for each operator family."""
