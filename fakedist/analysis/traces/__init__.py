"""A timed step: its kernels and the ranges they were launched in, whatever traced them."""
