"""The demand of a step on a GPU: the FLOPs, bytes and sizes of each operation and launch.

``operation_demand`` counts an operation's FLOPs and bytes, with the ``formulas`` of single operators. ``triton_demand``
counts those of Triton's kernels, from what ``triton_code`` reads in them, ``extension_demand`` those of Transformer
Engine's extension. ``work_shapes`` has the sizes of all. ``launch_demand`` divides an operation among its launches.
"""
