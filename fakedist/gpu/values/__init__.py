"""Values on the virtual GPU: small tensors are really computed, so the script's decisions are real."""

from fakedist.gpu.values.engine import ValueEngine
from fakedist.gpu.values.printing import printed_values

__all__ = ["ValueEngine", "printed_values"]
