"""A model of NCCL, from its sources and published logs: the channels and algorithm of a call, and the
memory they take.
"""
