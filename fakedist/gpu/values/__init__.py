"""Values on the virtual GPU: small tensors are really computed, so the script's decisions are real.

Device memory is host memory, so PyTorch's CPU kernels can compute over it.

- ``engine`` receives every operation and decides how it runs. ``operators`` has the facts about an operator,
  ``tensors`` finds the tensors of a call and their storages.
- Facts about device memory: ``contents`` (which elements hold a value, and which values are made up or computed from
  made-up ones), ``means`` (of large tensors: the mean of a mask, the sign). Both are kept by storage. ``host`` is the
  view of them through which values are read and written.
- Values that no kernel computed: ``inventions`` makes them up and counts them, and draws random numbers where the
  device's generator would; ``routing`` picks indices (a router's experts).
- Operations that need more than a kernel: ``host`` (their result, or its size, comes to the host), ``following`` (not
  all inputs were computed), ``recipes`` (large integers and masks), ``graph_values`` (integers of compiled graphs),
  ``composites`` (operations made of others, lists of tensors), ``sparse``, ``no_data`` (large tensors on the host).
- ``below_dispatch``: printing and CUDA graphs, which bypass the dispatcher.
"""
