"""The directory that is first on the PYTHONPATH of processes that a script on the virtual GPU starts."""
