"""DeepSpeed (0.19.8): what it keeps for a parameter, by the attributes that it sets, and lists that its ranks compare.

In a version that uses other names nothing is found, and memory counts as it would without this module.

====================================================  ================================================================
attribute                                             content
====================================================  ================================================================
``ds_tensor``                                         this rank's part of a parameter that ZeRO-3 has partitioned
``_hp_mapping.hp_fragment``                           ZeRO-1 and 2: the part of its fp32 master that this rank updates
``_z3_optimizer.fp32_partitioned_groups_flat``        ZeRO-3: the flat copies, with ``grad_position`` of each parameter
``grad_accum``                                        its gradient in another precision
``_hp_mapping.gradient_dict``                         ZeRO-1 and 2: the part of its gradient that this rank keeps
``_zero_optimizer``, ``_z3_optimizer``                the optimizer, with the buckets in which gradients are reduced
====================================================  ================================================================
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import ModuleType

import torch

_OPTIMIZERS = ("_zero_optimizer", "_z3_optimizer")
_ATTRIBUTES = frozenset(("ds_tensor", "_hp_mapping", "grad_accum", *_OPTIMIZERS))
#: Partitions of gradients by parameter, in ZeRO-3's optimizer.
_PARTS = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"


def keeps_tensors(parameter: torch.Tensor) -> bool:
    """Return whether it keeps anything for a parameter."""
    return not _ATTRIBUTES.isdisjoint(parameter.__dict__)


def part_of(parameter: torch.Tensor) -> object:
    """This rank's part of a partitioned parameter. None for a whole parameter."""
    return getattr(parameter, "ds_tensor", None)


def master_of(parameter: torch.Tensor) -> object:
    """The view of a flat tensor that the optimizer updates in the parameter's place, or None."""
    fragment = getattr(getattr(parameter, "_hp_mapping", None), "hp_fragment", None)
    if fragment is not None:
        return fragment
    optimizer = getattr(parameter, "_z3_optimizer", None)
    positions = getattr(optimizer, "grad_position", None)
    flat = getattr(optimizer, "fp32_partitioned_groups_flat", None)
    if not positions or not flat or not hasattr(parameter, "ds_id"):
        return None
    group, first, number = positions.get(parameter.ds_id, (len(flat), 0, 0))
    return flat[group].narrow(0, first, number) if group < len(flat) and flat[group] is not None else None


def gradients_of(parameter: torch.Tensor) -> Iterator[object]:
    """The places other than ``grad`` that hold the parameter's own gradient."""
    yield getattr(parameter, "grad_accum", None)
    mapping = getattr(parameter, "_hp_mapping", None)
    kept = getattr(mapping, "gradient_dict", {}).get(getattr(mapping, "param_group_index", None))
    place = getattr(parameter, "_index_in_param_group", None)
    if kept and place is not None and place < len(kept):
        yield kept[place]
    parts = getattr(getattr(parameter, "_z3_optimizer", None), _PARTS, {})
    yield parts.get(getattr(parameter, "ds_id", None))


def gradient_buffers(parameter: torch.Tensor) -> Iterator[object]:
    """Buffers through which gradients, of this parameter and of others, pass on their way to other ranks."""
    for name in _OPTIMIZERS:
        for bucket in getattr(getattr(parameter, name, None), "ipg_buckets", {}).values():
            buffer = getattr(bucket, "buffer", None)
            yield from buffer if isinstance(buffer, list) else (buffer,)


def lists_of_rank_0(module: ModuleType) -> dict[str, object]:
    """For ``deepspeed.runtime.zero.utils``: if rank 0's list did not arrive, take it to be like mine.

    ZeRO-3 compares its lists of modules and parameters with rank 0's, received in a buffer of -1 that stays -1 without
    a tape. A list from a tape is compared as usual.
    """
    replacements: dict[str, object] = {}
    if same_length := getattr(module, "assert_lst_len_same_as_other_ranks", None):

        @functools.wraps(same_length)
        def of_my_length(numbers: list[int]) -> None:
            try:
                same_length(numbers)
            except RuntimeError as error:
                if "rank0: -1 " not in str(error):
                    raise

        replacements["assert_lst_len_same_as_other_ranks"] = of_my_length
    if arrived := getattr(module, "get_lst_from_rank0", None):

        @functools.wraps(arrived)
        def like_mine(numbers: list[int]) -> list[int]:
            found: list[int] = arrived(numbers)
            return list(numbers) if found == [-1] * len(numbers) else found

        replacements["get_lst_from_rank0"] = like_mine
    return replacements
