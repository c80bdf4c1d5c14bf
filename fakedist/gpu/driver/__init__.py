"""The virtual GPU's driver: C source, and the build that turns it into one shared library in a cache."""
