"""The columns of a sweep's table, besides the axes."""

from __future__ import annotations

COLUMNS = (
    *("id", "status", "place", "on_front", "reason", "layer", "line"),
    *("peak_allocated_bytes", "peak_reserved_bytes", "nccl_low_bytes", "nccl_high_bytes", "context_bytes"),
    *("total_bytes", "capacity_bytes", "headroom_bytes"),
    *("step_us", "step_low_us", "step_high_us", "bubble_us", "bubble_from", "communication_us"),
    *("tokens_per_step", "tokens_per_s_per_gpu", "samples_per_step", "sample_shape", "samples_per_s_per_gpu"),
    *("tflops_per_gpu", "mfu", "mfu_torchtitan", "priced_gpu", "priced_fabric"),
    *("ranks", "has_every_stage", "stages", "is_check"),
    *("run", "host", "worker", "wall_s", "peak_rss_bytes"),
)
#: Columns that differ between two sweeps of the same points.
OF_THE_MACHINE = ("host", "worker", "wall_s", "peak_rss_bytes")
