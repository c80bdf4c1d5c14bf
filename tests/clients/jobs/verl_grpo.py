"""verl's trainer of one rank: its worker with an FSDP actor, log-probabilities of made-up answers, and an update.

With ``--engine`` also the server of vLLM that shares its GPU, in a Ray actor, as verl's controller starts it: the worker
sends it the weights, and it generates the answers.
"""

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Callable
from importlib.resources import files
from types import SimpleNamespace

os.environ |= {"VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_NO_USAGE_STATS": "1"}
os.environ |= {"HF_HUB_OFFLINE": "1", "RAY_AUTH_MODE": "disabled", "RAY_LOCAL_WORLD_SIZE": "8"}

import ray
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from tensordict import TensorDict
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config
from verl.utils import tensordict_utils
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMReplica
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

import fakedist

VOCABULARY, HIDDEN, INNER, LAYERS = 16000, 512, 1536, 4
#: Of each rank, in tokens.
ANSWERS, MICRO, PROMPT, ANSWER = 8, 2, 128, 128
RANKS = 8
#: In Ray's workers a model's directory has to stay.
DIRECTORY = tempfile.mkdtemp()


def write_model() -> None:
    """A model with weights, and a tokenizer of words."""
    words = {word: at for at, word in enumerate(["<pad>", "<eos>", *(f"w{number}" for number in range(VOCABULARY - 2))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    processing = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    processing.save_pretrained(DIRECTORY)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(DIRECTORY)


def configuration(*further: str) -> DictConfig:
    settings = [
        f"actor_rollout_ref.model.path={DIRECTORY}",
        "actor_rollout_ref.model.use_remove_padding=false",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.enforce_eager=true",
        "actor_rollout_ref.rollout.ignore_eos=true",
        f"actor_rollout_ref.rollout.prompt_length={PROMPT}",
        f"actor_rollout_ref.rollout.response_length={ANSWER}",
        "actor_rollout_ref.rollout.max_model_len=1024",
        f"actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu={MICRO}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={ANSWERS * RANKS}",
        f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={MICRO}",
        *further,
    ]
    with initialize_config_dir(str(files("verl.trainer") / "config"), version_base=None):
        return compose("ppo_trainer", overrides=settings).actor_rollout_ref


def worker(config: DictConfig, role: str) -> ActorRolloutRefWorker:
    made = ActorRolloutRefWorker(config, role=role)
    made.init_model()
    return made


class Here:
    """Handle of the worker, which is in this process, as far as the server's start asks it."""

    class __ray_call__:
        @staticmethod
        async def remote(function: Callable[..., object]) -> tuple[str, str]:
            return ray.get_runtime_context().get_node_id(), "0"


def server(config: DictConfig) -> vLLMReplica:
    replica = vLLMReplica(0, config.rollout, config.model)
    asyncio.run(replica.init_hybrid(SimpleNamespace(workers=[Here])))
    return replica


async def answers(replica: vLLMReplica) -> list[list[int]]:
    """As an agent loop of verl asks for them."""
    prompt, sampling = list(range(100, 100 + PROMPT)), {"temperature": 1.0, "logprobs": True}
    generate = replica.server_handle.generate.remote
    asked = [generate(prompt, dict(sampling), request_id=str(at)) for at in range(ANSWERS)]
    return [(await answer).token_ids for answer in asked]


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


def say(what: str, **more: int) -> None:
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    held = {"allocated": torch.cuda.memory_allocated(), "used": total - free}
    print("HELD", json.dumps({"at": what, **held, **more}), flush=True)


def main() -> None:
    has_engine = "--engine" in sys.argv
    config = configuration(*(word for word in sys.argv[1:] if word != "--engine"))
    write_model()
    if has_engine:
        ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 << 20, _temp_dir="/tmp/verl-ray")
    with fakedist.phase("start"):
        actor = worker(config, "actor_rollout" if has_engine else "actor")
    say("started")
    if has_engine:
        with fakedist.phase("server's start"):
            replica = server(config)
        say("served")
        with fakedist.phase("sleep"):
            asyncio.run(replica.sleep())
        say("asleep")
    for step in range(2):
        if has_engine:
            with fakedist.phase("weight sync"):
                asyncio.run(actor.update_weights(global_steps=step))
            say("synced")
            with fakedist.phase("rollout"):
                tokens = asyncio.run(answers(replica))
            say("generated", tokens=sum(map(len, tokens)))
            with fakedist.phase("sleep"):
                asyncio.run(replica.sleep())
            say("asleep")
        data = batch()
        tensordict_utils.assign_non_tensor(data, calculate_entropy=True, compute_loss=False)
        with fakedist.phase("log-probs"):
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
        with fakedist.phase("training"):
            actor.update_actor(data)
        say("trained")
    if has_engine:
        ray.shutdown()


main()
