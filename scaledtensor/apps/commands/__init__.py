"""The parsers of the command line: what `--help` prints, and what options may be.

Nothing here imports torch, which takes longer to load than a reader waits for help: a command
imports what it runs when it runs.
"""
