"""A timed step: kernels and the ranges that they were launched in, whoever traced them."""
