"""GPU models: what the virtual GPU reports about itself, and the limits that kernel times are estimated from.

Each file of TOML here describes one model. A user's ``--gpu my_gpu.toml`` has the same form.
"""
