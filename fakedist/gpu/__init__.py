"""Where the rank runs: the models of GPUs, the virtual one, and the values of its small tensors."""
