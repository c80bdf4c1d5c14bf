"""The fast path: operations that need nothing from Python are numbered and run in compiled code.

``compiled`` loads it and says which operations those may be. ``fast_path.cpp`` looks at a call's arguments and runs it,
or leaves it to Python. ``trace.cpp`` tags the operations of the timed step, ``history.cpp`` reads the allocator's
history, ``marks.cpp`` locates the tensors that the recorder marks, and ``objects.cpp`` finds Python's objects by type.
``build`` compiles all of it for the installed torch, and ``tracker.cpp``, with which ``event_tracker`` numbers the
allocator's events for torch 2.8 and 2.9.
"""
