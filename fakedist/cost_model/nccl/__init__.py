"""A model of NCCL, from its sources and published logs: a call's channels, algorithm and memory."""
