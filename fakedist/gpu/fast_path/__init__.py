"""The fast path: operations that need nothing from Python are numbered and run in compiled code.

``compiled`` loads it and states which operations those may be. ``fast_path.cpp`` runs a call or leaves it to Python;
``trace.cpp`` tags a timed step's operations, ``history.cpp`` reads the allocator's history, ``marks.cpp`` locates
marked tensors, ``objects.cpp`` finds Python's objects by type. ``build`` compiles it.
"""
