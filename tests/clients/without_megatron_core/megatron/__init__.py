"""Stands in front of megatron-core on the path of jobs that must not find it: there is no ``megatron.core`` in here."""
