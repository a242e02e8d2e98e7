"""Train drafters for speculative decoding, and decode with them."""

__version__ = "0.1.0"
