"""A model of NCCL, from its sources and published logs: what a call runs on, and what memory that takes.

``settings`` has its environment variables, ``interconnect`` and ``channels`` the channels that it opens on each GPU
model, ``group_shape`` where a group's ranks are, ``kinds`` which collective a call is. ``tuner`` chooses the algorithm
and the protocol of a call, as NCCL does. ``connections`` and ``communicators`` have the device memory of what it chose.
"""
