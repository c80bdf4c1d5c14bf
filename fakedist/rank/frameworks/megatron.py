"""Megatron-LM and Megatron Core: attributes that they set on a parameter, and what rank 0 says about the data.

Megatron-FSDP and Megatron Core's checkpoints ask all ranks for their parts, and fail unless they make up the whole.
"""

from __future__ import annotations

import functools
from contextlib import suppress
from types import ModuleType
from typing import TYPE_CHECKING

from fakedist.world.arrivals import sent_flags

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


#: Its gradient, in the buffer that Megatron's DistributedDataParallel reduces.
GRADIENT = "main_grad"
#: The fp32 tensor, or this rank's part of it, that the optimizer updates in the parameter's place.
MASTER = "main_param"
_LOADERS, _VALIDATE = "build_train_valid_test_data_loaders", "validate_sharding_integrity"


def flags_of_rank_0(module: ModuleType) -> dict[str, object]:
    """For ``megatron.training.training``: whether to train, validate and test.

    Only tensor parallel rank 0 loads data. It broadcasts the three flags, which follow from the arguments
    (``build_train_valid_test_data_loaders``).
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


def shards_of_one(module: ModuleType) -> dict[str, object]:
    """For ``megatron.core.dist_checkpointing.validation``: the shards of identical ranks do not make up the whole."""
    validate = getattr(module, _VALIDATE, None)
    if validate is None:
        return {}

    @functools.wraps(validate)
    def asked_but_not_compared(*args: object, **kwargs: object) -> None:
        with suppress(module.CheckpointingException):
            validate(*args, **kwargs)

    return {_VALIDATE: asked_but_not_compared}


def uneven_parts(module: ModuleType) -> dict[str, object]:
    """Keep a part within its parameter, and ignore that the parts of identical ranks do not make up the whole."""
    replacements: dict[str, object] = {}
    if gather := getattr(module, "gather_and_compute_chunk_metadata", None):

        @functools.wraps(gather)
        def within_the_whole(dtensor: DTensor) -> object:
            part = gather(dtensor)
            if 0 in part.sizes:
                return part  # a part of missing optimizer state has one dimension, whatever the parameter has
            ends = (whole - size for whole, size in zip(dtensor.shape, part.sizes, strict=True))
            offsets = tuple(max(0, min(place)) for place in zip(part.offsets, ends, strict=True))
            return type(part)(offsets=offsets, sizes=part.sizes)

        replacements["gather_and_compute_chunk_metadata"] = within_the_whole
    if validate := getattr(module, "validate_uneven_dtensor", None):

        @functools.wraps(validate)
        def asked_but_not_compared(dtensor: DTensor) -> None:
            with suppress(AssertionError):
                validate(dtensor)  # the real job makes its calls too

        replacements["validate_uneven_dtensor"] = asked_but_not_compared
    return replacements
