"""An engine of vLLM without weights: starts, decodes tokens that it makes up, sleeps, wakes, and says what it holds."""

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int("--process" in sys.argv)), "VLLM_USE_V2_MODEL_RUNNER": "0"}
os.environ |= {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
os.environ.setdefault("VLLM_ALLREDUCE_USE_FLASHINFER", "0")
os.environ |= {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}

import torch
from engine_model import MODEL
from vllm import LLM, SamplingParams

import fakedist

#: Two ranks share each layer: the job's, or processes of the engine's own.
OF_THE_JOB = {"tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher"}
SHARDED = {"tensor_parallel_size": 2} if "--process" in sys.argv else OF_THE_JOB


def say(what: str, **more: int) -> None:
    free, total = torch.cuda.mem_get_info()
    held = {"used": total - free, "reserved": torch.cuda.memory_reserved(), "allocated": torch.cuda.memory_allocated()}
    print("HELD", json.dumps({"at": what, **held, **more}), flush=True)


def main() -> None:
    directory = Path(tempfile.mkdtemp())
    (directory / "config.json").write_text(json.dumps(MODEL))
    with fakedist.phase("start"):
        engine = LLM(
            str(directory),
            load_format="dummy",
            skip_tokenizer_init=True,
            enable_sleep_mode=True,
            enforce_eager="--graphs" not in sys.argv,
            gpu_memory_utilization=0.5,
            max_model_len=4096,
            **(SHARDED if "--tensor-parallel" in sys.argv else {}),
        )
    cache = engine.llm_engine.vllm_config.cache_config
    say("started", blocks=cache.num_gpu_blocks, block_size=cache.block_size, total=torch.cuda.mem_get_info()[1])
    with fakedist.phase("rollout"):
        prompts = [{"prompt_token_ids": list(range(100, 164))}] * 4
        sampling = SamplingParams(max_tokens=4, ignore_eos=True, detokenize=False)
        answers = engine.generate(prompts, sampling, use_tqdm=False)
    say("decoded", tokens=sum(len(answer.outputs[0].token_ids) for answer in answers))
    for level in (1, 2):
        with fakedist.phase(f"sleep {level}"):
            engine.sleep(level=level)
        say(f"asleep {level}")
        with fakedist.phase("wake"):
            engine.wake_up()
        say(f"awake {level}")


if __name__ == "__main__":  # a process of the engine imports this file, too
    main()
