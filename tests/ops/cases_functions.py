"""Activations, elementary functions and losses."""
