"""torch.distributed.pipelining: what a stage learns from its neighbours before the first step.

The previous stage announces the shapes of its outputs, and the next stage those of its gradients. Only the previous
stage knows the shapes of its outputs, so they come from its tape. Gradients have the shapes of the outputs that this
stage has just announced (``_derive_grad_metas`` in torch/distributed/pipelining/_utils.py), so they need no tape.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

from fakedist.world.objects import standing_in

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage


def gradients_like_outputs(module: ModuleType) -> dict[str, object]:
    """For ``torch.distributed.pipelining.stage``, except in torch 2.11, which does not announce gradients."""
    if not hasattr(module.PipelineStage, "_recv_meta"):
        return {}
    receive = module.PipelineStage._recv_meta

    def receive_meta(self: PipelineStage, src_stage: int) -> object:
        if src_stage < self.stage_index:
            return receive(self, src_stage)
        with standing_in(
            lambda: module._StageBackwardMeta(module._derive_grad_metas(self._stage_meta.outputs)), "else"
        ):
            return receive(self, src_stage)

    return {"PipelineStage._recv_meta": receive_meta}
