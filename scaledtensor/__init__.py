"""scaledtensor: tensors that carry their own power-of-two scale. `import scaledtensor as sct`."""

from scaledtensor._version import __version__

__all__ = ["__version__"]
