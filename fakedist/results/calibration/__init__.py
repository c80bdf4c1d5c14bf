"""Times of a user's own GPU: matches the kernels of a trace with the launches that a run recorded of the same job."""
