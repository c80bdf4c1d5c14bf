"""What a step demands of a GPU: the FLOPs, bytes and sizes of each operation and launch.

``operation_demand`` counts an operation's FLOPs and bytes, with ``attention_demand``, ``row_lengths`` and
``kernel_parts``. ``triton_demand`` counts those of Triton's kernels, from ``triton_source`` and ``triton_templates``;
``transformer_engine_demand`` those of Transformer Engine's extension, with ``fused_attention_demand`` and
``quantized_tensors``. ``work_shapes`` has the sizes of all. ``launch_demand`` divides an operation among its launches
(``division``).
"""
