"""``nvidia-smi`` for scripts on the virtual GPU, with the standard library alone; first on their PATH."""
