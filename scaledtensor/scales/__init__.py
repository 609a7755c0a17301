"""Scales: powers of two, as numbers of the host and as closed forms in traced code."""
