"""Where the time of a step goes: one table of kernels in, one table an answer out."""
