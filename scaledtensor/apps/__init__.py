"""The commands of the command line. Nothing in the library imports this package.

Each command has a module with a function `run`: `demo`, `train`, `generate` and `formats`. Their
parsers are in `commands`. The demo and the trainings share a small GPT (`gpt`, ordinary PyTorch
that imports nothing from scaledtensor), a text (`text`), the training loop (`training`), and the
rows that are compared (`precision`, the only file that knows how a row computes).
"""
