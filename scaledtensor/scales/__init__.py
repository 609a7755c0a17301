"""Scales: powers of two, numbers of the host, and closed forms in traced code."""
