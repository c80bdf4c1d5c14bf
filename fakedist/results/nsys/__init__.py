"""Imports reports of Nsight Systems as runs, with the layers of their ranges. Never met a GPU."""
