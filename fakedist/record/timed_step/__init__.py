"""The timed step: which one it is, and the tools that trace its kernels."""
