"""DeepEP and HybridEP: their stand-ins on the virtual GPU, and published times of their kernels."""
