"""Where the time of a step goes. The table of kernels goes in; each answer is a table."""
