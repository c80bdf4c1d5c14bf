"""Values on the virtual GPU: small tensors are really computed, so the script's decisions are real.

Device memory is host memory, so PyTorch's CPU kernels can compute over it. Who does what:

- ``engine`` receives every operation and decides how it runs. ``operators`` tells it what to know about an operator,
  ``arguments`` finds the tensors of a call.
- What device memory holds: ``contents`` (which elements hold a value), ``taints`` (which values are made up or computed
  from made-up ones), ``shares`` (what is known of large tensors: how much of a mask is true, what is not negative).
  All three keep their facts in ``known``, by ``storage``. ``host`` is the view of the three through which values are
  read and written, and ``scans`` says what holds for all values of a tensor.
- Values that no kernel computed: ``inventions`` makes them up and counts them, ``choices`` picks indices (a router's
  experts), ``randoms`` draws where the device's generator would.
- Operations that need more than a kernel: ``host_reads`` (their result, or its size, comes to the host), ``following``
  (small results of operations that were not computed), ``foreach`` (lists of tensors), ``composites`` and ``inside``
  (operations made of others), ``hollow`` (large tensors on the host).
- ``below_dispatch``: printing and CUDA graphs, which bypass the dispatcher.
"""

from fakedist.gpu.values.engine import ValueEngine

__all__ = ["ValueEngine"]
