"""Programs of the processes that a confirmation starts, each with a CUDA context of its own."""
