"""The device of the rank: the virtual GPU, and the values of its small tensors.

- The virtual GPU: ``driver/`` stands in for the CUDA libraries, ``virtual`` loads it, ``smi/`` is its ``nvidia-smi``,
  ``values/`` computes small tensors, ``tuning`` skips autotuning.
- The work of a step: ``launch_log`` is the driver's log, ``demand/`` has FLOPs, bytes and sizes, ``launch_rows`` makes
  the journal's record, ``model_tracer`` connects them to the recorder.
- ``fast_path/``: operations recorded in C++; ``native`` compiles all that is built on the machine.
"""
