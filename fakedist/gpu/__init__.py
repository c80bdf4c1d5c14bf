"""Where the rank runs: the virtual GPU, and the values of its small tensors.

- The virtual GPU: ``driver/`` stands in for the CUDA libraries, ``virtual`` loads it, ``smi/`` is its ``nvidia-smi``,
  ``values/`` computes small tensors, ``tuning`` skips autotuning.
- What a step has to do: ``launch_log`` is the driver's log of launches. ``demand`` counts the FLOPs and bytes of an
  operation, with ``attention_demand``, ``row_lengths`` and ``kernel_parts``. ``triton_demand`` counts those of Triton's
  kernels, from ``triton_source`` and ``triton_templates``; ``transformer_engine_demand`` those of an extension's
  functions, which ``extension_calls`` watches. ``work_shapes`` has the sizes of all. ``launch_demand`` divides an
  operation among its launches (``division``), ``launch_rows`` makes the journal's record. ``model_tracer`` connects
  them to the recorder.
"""
