"""The step of a whole job: its ranks placed together, pipelines with more micro-batches, and throughput."""
