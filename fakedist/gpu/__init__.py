"""Where the rank runs: the GPU models, the virtual GPU, and the values of its small tensors."""
