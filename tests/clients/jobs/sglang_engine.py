"""An engine of SGLang without weights: starts, decodes tokens that it makes up, and says what it holds of the GPU."""

import json
import os
import sys
import tempfile
from pathlib import Path

import sglang
import torch
from engine_model import MODEL

import fakedist


def say(what: str, **more: int) -> None:
    free, total = torch.cuda.mem_get_info()
    print("HELD", json.dumps({"at": what, "used": total - free, **more}), flush=True)


def main() -> None:
    os.environ["LD_LIBRARY_PATH"] = os.environ["TRITON_LIBCUDA_PATH"]
    directory = Path(tempfile.mkdtemp())
    (directory / "config.json").write_text(json.dumps(MODEL))
    torch.zeros(1, device="cuda")
    say("before")
    with fakedist.phase("start"):
        engine = sglang.Engine(
            model_path=str(directory),
            load_format="dummy",
            skip_tokenizer_init=True,
            disable_cuda_graph="--graphs" not in sys.argv,
            mem_fraction_static=0.5,
            context_length=4096,
            random_seed=1,
            tp_size=2 if "--tensor-parallel" in sys.argv else 1,
            enable_memory_saver=True,
            attention_backend="triton",
            sampling_backend="pytorch",
            log_level="info",
        )
    say("started", cached_tokens=engine.get_server_info()["max_total_num_tokens"], total=torch.cuda.mem_get_info()[1])
    with fakedist.phase("rollout"):
        answers = engine.generate(
            input_ids=[list(range(100, 164))] * 4, sampling_params={"max_new_tokens": 4, "ignore_eos": True}
        )
    say("decoded", tokens=sum(len(answer["output_ids"]) for answer in answers))
    for tags in (["kv_cache"], ["weights"]):
        with fakedist.phase("sleep"):
            engine.release_memory_occupation(tags=tags)
        say(f"asleep {tags[0]}")
    with fakedist.phase("wake"):
        engine.resume_memory_occupation(tags=["weights", "kv_cache"])
    say("awake")
    engine.shutdown()


if __name__ == "__main__":
    main()
