"""Quantised models in the files of other libraries."""
