"""Reads Nsight Systems reports and joins their kernels with the ranges that the program pushed."""
