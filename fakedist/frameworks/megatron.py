"""Megatron-LM and Megatron Core: attributes that they set on a parameter, and what rank 0 says about the data."""

from __future__ import annotations

import functools
from types import ModuleType

from fakedist.world.arrivals import sent_flags

#: Its gradient, in the buffer that Megatron's DistributedDataParallel reduces.
GRADIENT = "main_grad"
#: The fp32 tensor, or this rank's part of it, that the optimizer updates in the parameter's place.
MASTER = "main_param"
_LOADERS = "build_train_valid_test_data_loaders"


def flags_of_rank_0(module: ModuleType) -> dict[str, object]:
    """For ``megatron.training.training``: whether to train, validate and test.

    Only tensor parallel rank 0 loads data. It broadcasts the three flags, which follow from the arguments
    (``build_train_valid_test_data_loaders``), to the ranks that do not.
    """
    build = getattr(module, _LOADERS, None)
    if build is None:
        return {}

    @functools.wraps(build)
    def build_with_flags(*args: object, **kwargs: object) -> object:
        options = module.get_args()
        trains = bool(getattr(options, "train_iters", None)) or getattr(options, "skip_train", False)
        evaluates = bool(getattr(options, "eval_iters", None)) or getattr(options, "full_validation", False)
        with sent_flags((int(trains), int(evaluates), int(evaluates))):
            return build(*args, **kwargs)

    return {_LOADERS: build_with_flags}
