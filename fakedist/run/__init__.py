"""The run directory: the one thing that the recording half and the reading half both know."""
