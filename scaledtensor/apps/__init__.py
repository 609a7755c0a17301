"""The demo and the `train` command: a small GPT, a text, and the rows that are compared.

`model.py` is ordinary PyTorch and imports nothing from scaledtensor; `precision.py` is the only
file that knows how a row computes. Nothing in the library imports this package.
"""
