"""Values on the virtual GPU: small tensors are really computed, so the script's decisions are real.

Device memory is host memory, so PyTorch's CPU kernels can compute over it.

- ``engine`` receives every operation and decides how it runs, from ``operators`` (facts about an operator) and
  ``tensors`` (a call's tensors and their storages).
- Facts by storage: ``contents`` (which elements hold a value, and which are made up), ``means`` (of large tensors: a
  mask's mean, the sign). ``host`` reads and writes values through them.
- Values that no kernel computed: ``inventions`` makes them up, counts them, and draws random numbers; ``routing`` picks
  indices (a router's experts).
- More than a kernel: ``host`` (results, or their sizes, on the host), ``following`` (inputs not computed), ``recipes``
  (large integers and masks), ``graph_values`` (integers of compiled graphs), ``composites`` (operations made of others,
  lists of tensors), ``sparse``, ``no_data`` (large tensors on the host).
- ``below_dispatch``: printing and CUDA graphs, which bypass the dispatcher.
"""
