"""Scattered writes, selections, scans and linear algebra."""
