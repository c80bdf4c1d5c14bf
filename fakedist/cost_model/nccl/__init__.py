"""A model of NCCL, from its sources and published logs: the channels and algorithm of a call, and the memory they take.

``settings`` has its environment variables and names, ``interconnect`` where a group's ranks are and the channels that
NCCL opens on each GPU model. ``tuner`` chooses the algorithm and the protocol of a call, as NCCL does.
``communicators`` has the device memory of what it chose.
"""
