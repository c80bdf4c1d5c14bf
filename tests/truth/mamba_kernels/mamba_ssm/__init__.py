"""Stands for mamba-ssm's own, which imports every model and their compiled kernels: megatron-core needs Triton's alone.

All other modules of the package are the installed ones.
"""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)
