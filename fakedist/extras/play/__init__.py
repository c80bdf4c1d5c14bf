"""Plays recorded allocations again with other sizes: draws of the load of experts, and long runs."""
