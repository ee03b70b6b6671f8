"""Windows that reduce, from a pooling to the whole image."""
