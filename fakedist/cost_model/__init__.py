"""How long kernels take: estimated from published measurements, for any GPU model, without running the job again."""
