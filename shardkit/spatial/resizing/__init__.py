"""Images of another size: bands of weights, who needs which elements, and the local products."""
