"""The fast path: operations that need nothing from Python are numbered and run in compiled code.

``rules`` says which operations those may be. ``fast_path.cpp`` looks at a call's arguments and runs it, or leaves it to
Python. ``trace.cpp`` and ``trace`` tag the operations of the timed step, ``history.cpp`` reads the allocator's history,
``marks.cpp`` locates the tensors that the recorder marks,
and ``objects.cpp`` finds Python's objects by type.
``build`` compiles all of it for the installed torch.
"""
