"""The run directory: all that the recording half and the reading half share."""
