"""Models: the normalised config, the tensors it implies, and the layer stack built from both."""
