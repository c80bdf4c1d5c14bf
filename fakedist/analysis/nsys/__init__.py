"""Reports of Nsight Systems: read, and joined with the ranges that the program pushed."""
