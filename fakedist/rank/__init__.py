"""The child process: becomes the rank, runs the script and records how it ended."""
