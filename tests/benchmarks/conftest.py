from tiny_drafter import drafter, target

__all__ = ["drafter", "target"]
