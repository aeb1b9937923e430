"""Position-sensitive axial attention and the systems built on it."""

__version__ = "0.2.0"
