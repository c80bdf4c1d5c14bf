"""A timed step that a GPU ran: its kernels and the ranges they were launched in, whatever the tool. Never met a GPU."""
