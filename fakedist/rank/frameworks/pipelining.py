"""torch.distributed.pipelining: a stage's knowledge of its neighbours before the first step.

The previous stage announces the shapes of its outputs, which come from its tape: only it knows them. The next stage
announces those of its gradients, which are those of the outputs that this stage has just announced
(``_derive_grad_metas`` in torch/distributed/pipelining/_utils.py), so they need no tape.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from fakedist.torch_releases import VOTE_OF_STAGES
from fakedist.world.objects import standing_in

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage


def stages_alone(module: ModuleType) -> dict[str, object]:
    """For ``torch.distributed.pipelining.stage``: what a stage needs that runs without its neighbours."""
    return {**_gradients_like_outputs(module), **_votes_alike(module)}


def _votes_alike(module: ModuleType) -> dict[str, object]:
    """Stages infer each other's shapes unless all were given theirs. The vote on it goes down the pipeline and back."""
    if not VOTE_OF_STAGES.is_missing() or not hasattr(module.PipelineStage, "_warmup_forward_vote"):
        return {}
    forward, backward = module.PipelineStage._warmup_forward_vote, module.PipelineStage._warmup_backward_result
    votes: WeakKeyDictionary[PipelineStage, int] = WeakKeyDictionary()

    def vote(self: PipelineStage, has_backward: bool, received_acc: torch.Tensor | None = None) -> torch.Tensor:
        product: torch.Tensor = forward(self, has_backward, received_acc)
        votes[self] = not module.InferenceMode.needs_dynamic(self._user_meta, has_backward)
        is_received = not self.is_first and not self._is_same_rank(self.stage_index - 1)
        return product.fill_(votes[self]) if is_received else product

    def result(self: PipelineStage, received_result: torch.Tensor | None = None) -> torch.Tensor:
        found: torch.Tensor = backward(self, received_result)
        is_received = not self.is_last and not self._is_same_rank(self.stage_index + 1)
        return found.fill_(votes[self]) if is_received else found

    return {"PipelineStage._warmup_forward_vote": vote, "PipelineStage._warmup_backward_result": result}


def _gradients_like_outputs(module: ModuleType) -> dict[str, object]:
    """Absent from torch 2.11 and older, which do not announce gradients."""
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
