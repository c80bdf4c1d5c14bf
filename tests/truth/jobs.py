"""Jobs whose step or peak others published, as fakedist runs them: torchtitan's, Megatron-LM's and Liger-Kernel's.

torchtitan's run with its release 0.1.0, the one next to the published tables of December 2024 and of early 2025, its
own entry point and its own configuration; its other requirements are those of today's torchtitan (``pip install
'fakedist[clients]'``). ``december_2024`` next to this file takes back what changed since then in torchtitan and torch.
Tokens are made up: a tokenizer with as many words as Llama's, and a text of them.

Megatron-LM's run with examples/megatron_gpt.py, which takes Megatron-LM's own flags, on megatron-core 0.16.1 and
Transformer Engine. Its loop is not pretrain_gpt.py's: docs/accuracy/method.md has what it leaves out on the host.

Models with Mamba layers also need the Triton kernels of mamba-ssm and causal-conv1d, neither of which has a wheel for
every torch: ``pip install --no-deps`` with MAMBA_SKIP_CUDA_BUILD=TRUE and CAUSAL_CONV1D_SKIP_CUDA_BUILD=TRUE installs
their Python alone, and ``mamba_kernels`` next to this file has what stands for the rest.

Liger-Kernel's run with ``liger_kernels.py`` next to this file, on the release that a row names; an example of another
project runs with the script next to this file that its row's flags begin with.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import ClassVar, NamedTuple

from fakedist.options import Job
from fakedist.units import GIB, UNLIMITED_BYTES

ROOT = Path(__file__).parents[2]
TITAN = "0.1.0"
PACKAGES = (f"torchtitan=={TITAN}", "tiktoken", "regex", "blobfile", "torchao==0.18.0")
INSTALLED = ROOT / "build" / "published"
#: What models with Mamba layers need besides.
_MAMBA = ("mamba-ssm", "causal-conv1d")
TIMEOUT_S = 1800
WORDS = 128_000  # and 256 special ones, as Llama 3's
CONFIG = """\
[metrics]
log_freq = 1
[model]
name = "llama3"
flavor = "8B"
norm_type = "rmsnorm"
tokenizer_path = "tokenizer.model"
[optimizer]
name = "AdamW"
lr = 3e-4
[training]
seed = 1  # without one, torch 2.8 fails to read rank 0's where Python runs operations
local_batch_size = 2
seq_len = 8192
max_norm = 1.0
steps = 8
dataset = "c4_test"
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
"""


class Flops(NamedTuple):
    """FLOPs of the recorded ranks of a step, by arithmetic.

    Attributes:
        products: Of matrix products.
        attention: Of attention.
    """

    products: float
    attention: float


@dataclass(frozen=True)
class Script(ABC):
    """The command of a published job.

    Attributes:
        flags: The script's own.
        environment: Variables of the published job.
        world_size: Ranks.
        stages: Numbers of the pipeline stages that are recorded; all if there are none.
    """

    flags: tuple[str, ...]
    environment: Mapping[str, str]
    world_size: int
    stages: tuple[int, ...] = ()

    @property
    def options(self) -> Mapping[str, str]:
        """The flags by name without dashes; those that take no value have an empty one."""
        words = [*self.flags, "--"]
        return {
            word[2:]: "" if after.startswith("--") else after
            for word, after in itertools.pairwise(words)
            if word.startswith("--")
        }

    @property
    def needs(self) -> tuple[str, ...]:
        """Distributions that ``make frameworks`` does not install."""
        return ()

    @property
    def nccl(self) -> Mapping[str, str]:
        """NCCL's variables."""
        return {name: value for name, value in self.environment.items() if name.startswith("NCCL_")}

    @property
    @abstractmethod
    def ranks(self) -> tuple[int, ...]:
        """The ranks that a step needs."""

    @property
    @abstractmethod
    def peak_rank(self) -> int:
        """The rank whose peak was published."""

    @abstractmethod
    def job(self, rank: int, gpu: str, *, is_timed: bool) -> Job:
        """The rank as a job. A timed one records its launches on a GPU of any size."""

    @abstractmethod
    def flops(self) -> Flops:
        """The FLOPs that the model asks for in a step."""


class Titan(Script):
    """torchtitan's Llama 3.1, FSDP, sequences of 8,192 tokens: 8B with every second product recomputed, or 70B."""

    ranks = (0,)
    peak_rank = 0

    def job(self, rank: int, gpu: str, *, is_timed: bool) -> Job:
        path = (ROOT, INSTALLED, Path(__file__).parent / "december_2024")
        return Job(
            world_size=self.world_size, rank=rank, target="torchtitan.train", is_module=True,
            arguments=("--job.config_file", "config.toml", *self.flags), gpu_memory_bytes=95 * GIB, steps=3, page=False,
            environment=(("PYTHONPATH", os.pathsep.join(map(str, path))),), timeout_s=TIMEOUT_S,
        )  # fmt: skip

    def flops(self) -> Flops:
        options = self.options
        tensor = int(options.get("parallelism.tensor_parallel_degree", 1))
        tokens = int(options.get("training.local_batch_size", 2)) * (sequence := 8192)
        kv, words = 1024, 128_256
        if options.get("model.flavor") == "70B":
            layers, width, inner = 80, 8192, 28_672
            recomputed = 2 * width * (width + kv + inner)  # all products of a layer but the last
            attentions = 2 + 2 + 5
        else:
            layers, width, inner = 32, 4096, 14_336
            recomputed = width * kv + width * inner  # every second product: wk, wo, w3
            attentions = 2 + 5
            if tensor == 1:  # else the sum of wo's result over the ranks is kept
                recomputed += width * width
        layer = 2 * width * width + 2 * width * kv + 3 * width * inner
        products = 2 * tokens * (3 * (layers * layer + width * words) + layers * recomputed)
        attention = layers * attentions * 2 * tokens * (sequence + 1) / 2 * width
        return Flops(products / tensor, attention / tensor)


def prepare_titan(directory: Path) -> None:
    """Install torchtitan 0.1.0 unless it is installed, and write its job's files into a directory.

    Raises:
        subprocess.CalledProcessError: pip failed.
    """
    if not (INSTALLED / "torchtitan").exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(INSTALLED)]
        subprocess.run([*pip, *PACKAGES], check=True)
    (directory / "config.toml").write_text(CONFIG)
    lines = [f"{base64.b64encode(word).decode()} {number}" for number, word in enumerate(_words())]
    (directory / "tokenizer.model").write_text("\n".join(lines) + "\n")
    texts = directory / "tests" / "assets" / "c4_test"
    texts.mkdir(parents=True, exist_ok=True)
    text = " ".join(f"word{number} text" for number in range(3_000))
    (texts / "data.json").write_text((json.dumps({"text": text}) + "\n") * 200)


def _words() -> Iterator[bytes]:
    letters = b"abcdefghijklmnopqrstuvwxyz"
    single = (bytes([byte]) for byte in range(256))
    longer = (bytes(word) for length in (2, 3, 4) for word in itertools.product(letters, repeat=length))
    return itertools.islice(itertools.chain(single, longer), WORDS)


class Liger(Script):
    """A kernel of Liger-Kernel's benchmark: its flags are kernel, provider, size and the release of liger-kernel."""

    ranks = (0,)
    peak_rank = 0

    @property
    def release(self) -> str:
        """The release of liger-kernel."""
        return self.flags[-1]

    def job(self, rank: int, gpu: str, *, is_timed: bool) -> Job:
        path = (ROOT, INSTALLED / f"liger-kernel-{self.release}")
        return Job(
            world_size=1, rank=0, target=str(Path(__file__).parent / "liger_kernels.py"), arguments=self.flags[:-1],
            gpu=gpu, steps=4, page=False, environment=(("PYTHONPATH", os.pathsep.join(map(str, path))),),
            timeout_s=TIMEOUT_S,
        )  # fmt: skip

    def flops(self) -> Flops:
        """None: steps of kernels are not recorded."""
        return Flops(0.0, 0.0)


def prepare_liger(releases: Iterable[str]) -> None:
    """Install releases of liger-kernel that are not installed, each in a directory of its own.

    Raises:
        subprocess.CalledProcessError: pip failed.
    """
    for release in releases:
        target = INSTALLED / f"liger-kernel-{release}"
        if not target.exists():
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target)]
            subprocess.run([*pip, f"liger-kernel=={release}"], check=True)


class Example(Script):
    """An example of a project, as a script next to this file has it: the flags are its name and its arguments."""

    ranks = (0,)
    peak_rank = 0

    @property
    def needs(self) -> tuple[str, ...]:
        return ("deepspeed",)

    def job(self, rank: int, gpu: str, *, is_timed: bool) -> Job:
        script, *arguments = self.flags
        return Job(
            world_size=self.world_size, rank=rank, target=str(Path(__file__).parent / script),
            arguments=tuple(arguments), gpu=gpu, steps=3, kernels=is_timed, page=False,
            environment=(("PYTHONPATH", str(ROOT)),), timeout_s=TIMEOUT_S,
        )  # fmt: skip

    def flops(self) -> Flops:
        """Layers run again in backward, and their attention is of products."""
        layers, width, words, tokens = 32, 4096, 50_257, 512
        layer = 12 * width * width + 2 * tokens * width
        return Flops(2 * tokens * (4 * layers * layer + 3 * width * words), 0.0)


class Megatron(Script):
    """A model of Megatron-LM's functional tests or of NVIDIA's benchmarks, by Megatron-LM's own flags."""

    @property
    def needs(self) -> tuple[str, ...]:
        return ("megatron-core", "transformer-engine-torch", *(_MAMBA if self._layers else ()))

    #: The script that runs it.
    target: ClassVar[Path] = ROOT / "examples" / "megatron_gpt.py"

    @property
    def ranks(self) -> tuple[int, ...]:
        """The first rank of each stage that is recorded."""
        ranks = range(0, self.world_size, self.world_size // self.num_stages)
        return tuple(ranks[stage] for stage in self.stages or range(self.num_stages))

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline, recorded or not."""
        return self._size("pipeline-model-parallel-size", 1)

    @property
    def num_chunks(self) -> int:
        """Model chunks of each stage."""
        if layers := self._size("num-layers-per-virtual-pipeline-stage", 0):
            return self._size("num-layers") // self.num_stages // layers
        return self._size("num-virtual-stages-per-pipeline-rank", 1)

    @property
    def peak_rank(self) -> int:
        """The last rank, which writes the log."""
        return self.world_size - 1

    @property
    def _is_timed_with_graphs(self) -> bool:
        """CUDA graphs are captured after the third step. HybridEP's counts of tokens are not known in their replays."""
        return "cuda-graph-impl" in self.options and "moe-flex-dispatcher-backend" not in self.options

    def job(self, rank: int, gpu: str, *, is_timed: bool) -> Job:
        path: list[object] = [ROOT, Path(__file__).parent / "megatron_fusion", ROOT / "examples"]
        if self._layers:
            installed = [found.locate_file("") for name in _MAMBA for found in distributions(name=name)]
            path += [Path(__file__).parent / "mamba_kernels", *dict.fromkeys(installed)]
        joined = os.pathsep.join(map(str, path))
        environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", **self.environment, "PYTHONPATH": joined}
        return Job(
            world_size=self.world_size, rank=rank, target=str(self.target),
            arguments=("--max-microbatches", "0", *self.flags), gpu=gpu,
            # Nemotron takes 80.3 GiB: today's fused cross entropy copies the logits, those of 2025 did not.
            gpu_memory_bytes=UNLIMITED_BYTES if is_timed else None,
            steps=5 if is_timed and self._is_timed_with_graphs else 3, kernels=is_timed, page=False,
            environment=tuple(environment.items()), timeout_s=TIMEOUT_S,
        )  # fmt: skip

    def flops(self) -> Flops:
        """The FLOPs of the recorded stages of a replica, the last among them, on one of its tensor parallel ranks.

        Of what is recomputed, those of all layers and of unfused attention.
        """
        size, options = self._size, self.options
        layers, hidden, sequence = size("num-layers"), size("hidden-size"), size("seq-length")
        tensor, inner = size("tensor-model-parallel-size", 1), size("ffn-hidden-size", 4 * hidden)
        replicas = self.world_size // tensor // self.num_stages
        layers = layers * len(self.ranks) // self.num_stages
        tokens = size("global-batch-size") // replicas * sequence
        if "multi-latent-attention" in options:
            return self._latent_flops(tokens)
        if self._layers:
            return self._hybrid_flops(tokens)
        heads, experts = size("num-attention-heads"), size("num-experts", 0)
        channels = size("kv-channels", hidden // heads)
        layer = 2 * hidden * channels * (heads + size("num-query-groups", heads))
        linear = 3 if {"swiglu", "quick-geglu"} & options.keys() else 2
        if experts:
            layer += hidden * (experts + size("moe-router-topk") * linear * size("moe-ffn-hidden-size", inner))
        else:
            layer += linear * hidden * inner
        recomputes = options.get("recompute-granularity")
        passes = 4 if recomputes == "full" else 3
        products = 2 * tokens * (passes * layers * layer + 3 * hidden * self._padded_words)
        of_key = 2 * tokens * heads * channels  # a product of all queries and one key each
        if options.get("attention-backend") == "unfused":
            unfused = (2 * 2 if recomputes else 2) + 4
            return Flops((products + unfused * layers * sequence * of_key) / tensor, 0.0)
        attention = (2 + 5) * of_key * layers * (sequence + 1) / 2
        if window := size("window-size", 0):  # in every second layer
            keys = window + 1
            seen = keys - keys * (keys - 1) / (2 * sequence)  # by a query on average
            attention = (2 + 5) * of_key * layers / 2 * ((sequence + 1) / 2 + seen)
        return Flops(products / tensor, attention / tensor)

    def _latent_flops(self, tokens: int) -> Flops:
        """The same with unfused latent attention, experts in all layers but one, and one more that predicts a token."""
        size = self._size
        layers, hidden, heads = size("num-layers"), size("hidden-size"), size("num-attention-heads")
        queries, latent, position = size("q-lora-rank"), size("kv-lora-rank"), size("qk-pos-emb-head-dim")
        keys, values = size("qk-head-dim") + position, size("v-head-dim")
        attention = hidden * (queries + latent + position + heads * values)
        attention += heads * (queries * keys + latent * (size("qk-head-dim") + values))
        gated, router = 3 * hidden * size("moe-ffn-hidden-size"), hidden * size("num-experts")
        with_experts = attention + router + (size("moe-router-topk") + 1) * gated  # and a shared one
        block = attention + 3 * hidden * size("ffn-hidden-size") + layers * with_experts  # 15 and the one more
        predicts = 2 * hidden * hidden + 2 * hidden * self._padded_words
        scores = (layers + 1) * size("seq-length") * heads * (keys + values)
        return Flops(3 * 2 * tokens * (block + predicts + scores) / size("tensor-model-parallel-size"), 0.0)

    def _hybrid_flops(self, tokens: int) -> Flops:
        """The same with Mamba layers, without the products inside of their scans."""
        size = self._size
        hidden, heads = size("hidden-size"), size("num-attention-heads")
        channels, inner = hidden // heads, 2 * hidden
        states = 2 * size("mamba-num-groups", 8) * size("mamba-state-dim", 128)
        weights = {
            "M": hidden * (2 * inner + states + inner // size("mamba-head-dim", 64)) + inner * hidden,
            "-": 2 * hidden * size("ffn-hidden-size", 4 * hidden),
            "*": 2 * hidden * channels * (heads + size("num-query-groups")),
        }
        products = 3 * 2 * tokens * (sum(weights[layer] for layer in self._layers) + hidden * self._padded_words)
        tensor, of_key = size("tensor-model-parallel-size", 1), 2 * tokens * heads * channels * self._layers.count("*")
        if self.options.get("attention-backend") == "unfused":
            return Flops((products + (2 + 4) * size("seq-length") * of_key) / tensor, 0.0)
        return Flops(products / tensor, (2 + 5) * of_key * (size("seq-length") + 1) / 2 / tensor)

    @property
    def _layers(self) -> str:
        """The layers of a model with Mamba layers, a letter each; of others empty."""
        return self.options.get("hybrid-override-pattern", "")

    @property
    def _padded_words(self) -> int:
        """The tokenizer of Megatron-LM has a word more than --vocab-size, which is padded."""
        divisor = self._size("make-vocab-size-divisible-by", 128) * self._size("tensor-model-parallel-size", 1)
        return -(-(self._size("vocab-size") + 1) // divisor) * divisor

    def _size(self, name: str, default: int | None = None) -> int:
        text = self.options.get(name)
        if text is None and default is None:
            raise LookupError(f"the job lacks --{name}")
        return int(text) if text is not None else default or 0


class Megatron2022(Megatron):
    """A GPT of Megatron-LM's papers of 2022: ``megatron_2022.py`` next to this file has what differs."""

    target = Path(__file__).parent / "megatron_2022.py"
