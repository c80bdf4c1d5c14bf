"""Two steps of TRL's GRPO with vLLM in the trainer's process, of a small Llama without trained weights."""

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0"}
os.environ |= {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_NO_USAGE_STATS": "1"}
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}

import torch
from datasets import Dataset
from datasets.table import InMemoryTable
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

UTILIZATION = float(sys.argv[1]) if len(sys.argv) > 1 else 0.3
ENGINE_RANKS = int(sys.argv[2]) if len(sys.argv) > 2 else 1
PROMPT, ANSWER, BATCH = 8, 16, 4

torch.manual_seed(0)
directory = Path(tempfile.mkdtemp())
words = {word: at for at, word in enumerate(["<pad>", "<eos>", *(f"w{number}" for number in range(1022))])}
tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
processing = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
processing.save_pretrained(directory)
model = LlamaForCausalLM(
    LlamaConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=8,
        vocab_size=32768,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        dtype=torch.bfloat16,
    )
).to(torch.bfloat16)
model.save_pretrained(directory)
del model
prompts = InMemoryTable.from_pydict({"prompt": [" ".join(["w1"] * PROMPT)] * 256})


class Engine(TrainerCallback):
    """Says what the engine got once the training begins."""

    def on_train_begin(self, args: object, state: object, control: object, **kwargs: object) -> None:
        """Print the KV cache's blocks, and what the engine holds asleep."""
        free, total = torch.cuda.mem_get_info()
        cache = trainer.vllm_generation.llm.llm_engine.vllm_config.cache_config
        held = {"used": total - free, "total": total, "blocks": cache.num_gpu_blocks, "block_size": cache.block_size}
        print("HELD", json.dumps(held), flush=True)


trainer = GRPOTrainer(
    model=str(directory),
    reward_funcs=lambda completions, **kwargs: [float(len(completion)) for completion in completions],
    args=GRPOConfig(
        output_dir=str(directory / "out"),
        per_device_train_batch_size=BATCH,
        num_generations=BATCH,
        max_completion_length=ANSWER,
        max_steps=2,
        bf16=True,
        model_init_kwargs={"dtype": "bfloat16"},
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        use_vllm=True,
        vllm_mode="colocate",
        vllm_enable_sleep_mode=True,
        vllm_gpu_memory_utilization=UTILIZATION,
        vllm_max_model_length=1024,
        vllm_tensor_parallel_size=ENGINE_RANKS,
    ),
    train_dataset=Dataset(prompts, fingerprint="made-up"),  # dill cannot hash every pyarrow's types
    processing_class=processing,
    callbacks=[Engine()],
)
trainer.train()
