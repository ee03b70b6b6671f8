"""Convolutions: what a call means (args), the region it runs in, and the forms a device's part takes."""
