"""Kernel times on one GPU: a model that rests on published measurements, and the calibration table of a user's own."""
