"""Reads what other programs wrote of real GPUs, and steps that a tool traced, into the records that runs have."""
