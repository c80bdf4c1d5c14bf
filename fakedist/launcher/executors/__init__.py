"""Where tasks run: on this machine or on a Ray cluster. A task is one job's run, as ``fakedist profile`` makes it."""
