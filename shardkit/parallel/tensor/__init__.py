"""Tensor parallelism: layers, embeddings and losses whose weights or classes devices share out."""
