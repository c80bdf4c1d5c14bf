"""verl's trainer of one rank: its worker with an FSDP actor, log-probabilities of made-up answers, and an update."""

import json
import sys
import tempfile
from importlib.resources import files

import torch
from hydra import compose, initialize_config_dir
from tensordict import TensorDict
from verl.utils import tensordict_utils
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding
from verl_model import PROMPT, VOCABULARY, write

import fakedist

#: Of each rank, in tokens.
ANSWERS, MICRO, ANSWER = 8, 2, 128
RANKS = 8


def worker(directory: str, *further: str) -> ActorRolloutRefWorker:
    settings = [
        f"actor_rollout_ref.model.path={directory}",
        "+actor_rollout_ref.model.load_tokenizer=false",
        "actor_rollout_ref.model.use_remove_padding=false",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        "actor_rollout_ref.rollout.name=vllm",
        f"actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu={MICRO}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={ANSWERS * RANKS}",
        f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={MICRO}",
        *further,
    ]
    with initialize_config_dir(str(files("verl.trainer") / "config"), version_base=None):
        config = compose("ppo_trainer", overrides=settings)
    made = ActorRolloutRefWorker(config.actor_rollout_ref, role="actor")
    made.init_model()
    return made


def batch() -> TensorDict:
    """As the controller sends it: prompts and answers of equal lengths."""
    tokens = torch.arange(ANSWERS * (PROMPT + ANSWER)).reshape(ANSWERS, -1) % VOCABULARY
    fields = {
        "prompts": tokens[:, :PROMPT],
        "responses": tokens[:, PROMPT:],
        "input_ids": tokens.clone(),
        "attention_mask": torch.ones_like(tokens),
        "position_ids": torch.arange(PROMPT + ANSWER).expand(ANSWERS, -1).contiguous(),
        "response_mask": torch.ones(ANSWERS, ANSWER, dtype=torch.long),
    }
    made = left_right_2_no_padding(TensorDict(fields, batch_size=ANSWERS))
    tensordict_utils.assign_non_tensor(made, temperature=1.0)
    return made


def say(what: str) -> None:
    torch.cuda.empty_cache()
    print("HELD", json.dumps({"at": what, "allocated": torch.cuda.memory_allocated()}), flush=True)


def main() -> None:
    with fakedist.phase("start"):
        directory = tempfile.mkdtemp()
        write(directory, num_prompts=1)
        actor = worker(directory, *sys.argv[1:])
    say("started")
    for _ in range(2):
        data = batch()
        tensordict_utils.assign_non_tensor(data, calculate_entropy=True, compute_loss=False)
        before = no_padding_2_padding(actor.compute_log_prob(data)["log_probs"], data)
        data = batch()
        data["old_log_probs"], data["advantages"] = before.float(), torch.ones(ANSWERS, ANSWER)
        tensordict_utils.assign_non_tensor(
            data,
            calculate_entropy=False,
            global_batch_size=ANSWERS * RANKS,
            mini_batch_size=ANSWERS * RANKS,
            epochs=1,
            seed=1,
            dataloader_kwargs={"shuffle": False},
            compute_loss=True,
        )
        actor.update_actor(data)
        say("trained")


main()
