"""The job's other ranks, faked: this rank's environment, and what arrives from the others."""
