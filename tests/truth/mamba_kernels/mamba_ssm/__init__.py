"""Stands for mamba-ssm's own, which imports every model and their compiled kernels: megatron-core needs the Triton ones.

The rest of the package is the installed one.
"""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)
