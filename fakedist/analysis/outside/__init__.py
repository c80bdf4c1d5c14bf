"""Device memory outside of the caching allocator: what NCCL takes, estimated; what is not known, named."""
