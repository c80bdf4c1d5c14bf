"""A model of NCCL, from its sources and published logs: how it runs calls, and what memory that takes.

``settings`` has its environment variables, ``interconnect`` the channels that it opens on each GPU model,
``group_shape`` where a group's ranks are. ``connections`` and ``communicators`` have its device memory.
"""
