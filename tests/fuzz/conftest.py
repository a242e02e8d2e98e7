"""The tiny target, loaded, and a drafter of it."""

from tiny_drafter import drafter, target

__all__ = ["drafter", "target"]
