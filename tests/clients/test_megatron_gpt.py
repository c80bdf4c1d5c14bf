"""examples/megatron_gpt.py: small jobs with the layouts of its presets; what they hold, computed by hand."""

from __future__ import annotations

import importlib.metadata
import shlex
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from tests.clients.megatron_arithmetic import Sizes
from tests.conftest import RunFakedist
from tests.support.runs import Finished


def installed(name: str) -> bool:
    return any(importlib.metadata.distributions(name=name))


pytestmark = pytest.mark.skipif(
    not installed("megatron_core"), reason="not installed: pip install --no-deps megatron-core==0.16.1"
)
SCRIPT = Path(__file__).parents[2] / "examples/megatron_gpt.py"
TRANSFORMER_ENGINE = pytest.mark.skipif(
    not installed("transformer_engine_torch"), reason="not installed: tests/clients/build_transformer_engine.sh"
)
IMPLEMENTATIONS = pytest.mark.parametrize(
    "layers", ["local", pytest.param("transformer_engine", marks=TRANSFORMER_ENGINE)]
)
#: DeepSeek-V3 in small: 16 ranks, latent attention, a dense layer first, experts, a shared one, a layout by hand.
SIZES = Sizes(512, 8, 2048, 32256, 8, 1024, 16, 2, 2, 4, 1024, latent=(192, 128, 64, 32, 64))
SMALL = shlex.split("""
    --bf16 --swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope --no-rope-fusion
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --seq-length 256
    --max-position-embeddings 256 --lr 1e-4 --exit-interval 2 --global-batch-size 16 --sequence-parallel
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --no-persist-layer-norm
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --expert-model-parallel-size 4
    --expert-tensor-parallel-size 1 --num-layers 4 --hidden-size 512 --ffn-hidden-size 2048 --num-attention-heads 8
    --num-experts 8 --moe-ffn-hidden-size 1024 --moe-router-topk 2 --moe-token-dispatcher-type alltoall
""")
LATENT = shlex.split("""
    --pipeline-model-parallel-layout Et|tt|t|L --moe-layer-freq [0]*1+[1]*3 --multi-latent-attention --qk-layernorm
    --q-lora-rank 192 --kv-lora-rank 128 --qk-head-dim 64 --qk-pos-emb-head-dim 32 --v-head-dim 64
    --moe-shared-expert-intermediate-size 1024 --moe-router-group-topk 2 --moe-router-num-groups 4
    --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-dtype fp32
    --recompute-granularity selective --recompute-modules mlp layernorm mla_up_proj
""")
FAKE = "--fake-process-group"


class Profiles:
    """Runs of the script, each made once."""

    def __init__(self, run: RunFakedist, directory: Path) -> None:
        self._run, self._directory = run, directory
        self._known: dict[tuple[object, ...], Path] = {}

    def __call__(self, rank: int, *arguments: str) -> Path:
        """The run directory of one rank of 16."""
        directory = self._known.get((rank, *arguments))
        if directory is None:
            directory = self._known[rank, *arguments] = self._directory / str(len(self._known))
            finished = self.run(16, rank, directory, arguments)
            assert finished.code == 0, finished.stdout + finished.stderr
            assert finished.stdout.count("grad norm") == 2
            assert "nan" not in finished.stdout
        return directory

    def run(self, world: int, rank: int, directory: Path, arguments: tuple[str, ...]) -> Finished:
        """One rank, whatever becomes of it."""
        where = ["--device", "virtual", "--gpu", "h100-80g", "--world-size", str(world), "--rank", str(rank)]
        return self._run("profile", *where, "--output", directory, SCRIPT, *arguments)


@pytest.fixture(scope="module")
def profiles(run_fakedist: RunFakedist, tmp_path_factory: pytest.TempPathFactory) -> Profiles:
    return Profiles(run_fakedist, tmp_path_factory.mktemp("megatron"))


def between_steps(run: Path) -> dict[str, float]:
    """Bytes by category when the second step begins: nothing is left of a forward or a backward.

    As requested, because what the allocator adds is much of so small buffers; and without the tables of rotary
    embeddings, which are buffers of modules.
    """
    blocks = pd.read_parquet(run / "tables/blocks.parquet")
    rotary = pd.read_parquet(run / "tables/layers.parquet")["name"].str.endswith("rotary_pos_emb")
    blocks = blocks[~rotary.to_numpy()[blocks["layer"]]]
    begins = blocks.loc[blocks["step"] == 2, "alloc_event"].min()
    alive = blocks[(blocks["alloc_event"] < begins) & (blocks["free_event"] >= begins)]
    found: dict[str, float] = alive.groupby("category", observed=True)["requested_bytes"].sum().to_dict()
    return found


def layers(run: Path) -> pd.DataFrame:
    return pd.read_parquet(run / "tables/layers.parquet").set_index("name")


def operations(run: Path) -> dict[tuple[str, str], int]:
    calls = pd.read_parquet(run / "tables/collectives.parquet")
    return calls.groupby(["group", "operation"], observed=True).size().to_dict()  # type: ignore[no-any-return]


@IMPLEMENTATIONS
@pytest.mark.parametrize("rank", [0, 15])
def test_parameters_gradients_and_optimizer_are_what_the_flags_say(profiles: Profiles, layers: str, rank: int) -> None:
    """Stages "Et" and "t" of the first rank, "tt" and "L" of the last. Padding is within a percent."""
    sizes = replace(SIZES, shards_down=layers == "local")
    held = sizes.held(0, 2, output=True) if rank else sizes.held(1, 1, embedding=True)
    found = between_steps(profiles(rank, *SMALL, *LATENT, "--transformer-impl", layers))
    for category, bytes_ in held.bytes_by_category().items():
        assert found[category] == pytest.approx(bytes_, rel=0.01), category


@IMPLEMENTATIONS
def test_layers_have_their_parts_of_flat_buffers(profiles: Profiles, layers: str) -> None:
    """All of the weights of a rank's two experts lie in one buffer, with those of other modules in between."""
    run = profiles(0, *SMALL, *LATENT, "--transformer-impl", layers)
    table = pd.read_parquet(run / "tables/layers.parquet")
    experts = table[table["name"].str.contains(r"\.experts\..*linear_fc1$")]
    weights = 2 * 2 * SIZES.expert_ffn * SIZES.hidden
    assert experts["most_parameter_bytes"].sum() == pytest.approx(2 * weights, rel=0.01)
    # In float32 in the buffer, and one at a time in bfloat16 before it is added there.
    assert 4 * weights <= experts["most_gradient_bytes"].sum() <= 6 * weights
    # Moments and the fp32 copy of this rank's part: the buffer is cut in two, wherever that is.
    state = experts["most_optimizer_state_bytes"].sum()
    assert 0 < state <= 12 * weights
    outside = table.loc[0, "most_optimizer_state_bytes"]
    assert outside < 0.02 * table["most_optimizer_state_bytes"].sum()


@TRANSFORMER_ENGINE
def test_eight_bit_copies_of_weights_are_parameters(profiles: Profiles) -> None:
    """transformer_engine keeps each weight of a linear layer by rows and by columns, from the first microbatch on."""
    held = SIZES.held(1, 1, embedding=True)
    kept = held.dense + held.experts - SIZES.vocabulary // SIZES.tp * SIZES.hidden
    found = between_steps(profiles(0, *SMALL, *LATENT, "--fp8-format", "e4m3", "--fp8-recipe", "blockwise"))
    assert found["parameter"] == pytest.approx(held.bytes_by_category()["parameter"] + 2 * kept, rel=0.01)
    assert found["activation"] < 1 << 20


def test_a_stock_fake_process_group_is_as_good_as_any(profiles: Profiles) -> None:
    """Megatron-LM's --fake-process-group: init_process_group(backend="fake", store=FakeStore())."""
    plain, stock = (profiles(0, *SMALL, *LATENT, "--transformer-impl", "local", *more) for more in ((), (FAKE,)))
    for category in ("parameter", "gradient", "optimizer_state"):
        assert between_steps(stock)[category] == between_steps(plain)[category]
    assert operations(stock) == operations(plain)


def test_flags_that_megatron_core_does_not_have_are_refused(profiles: Profiles, tmp_path: Path) -> None:
    for arguments, complaint in (
        (("--moe-router-padding", "4"), "--moe-router-padding 4: neither a setting of megatron-core 0.16.1 nor a flag"),
        (("--q-lora-rank", "4", "--num-layers", "2"), "--q-lora-rank: needs --multi-latent-attention"),
        (("--pipeline-model-parallel-size", "3"), "world_size (16) is not divisible by 6"),
    ):
        finished = profiles.run(16, 0, tmp_path / arguments[0], (*SMALL, "--transformer-impl", "local", *arguments))
        assert finished.code == 1
        assert complaint in finished.stdout + finished.stderr


def test_allgather_dispatcher_context_of_virtual_stages_and_full_recompute(profiles: Profiles) -> None:
    """Other ways through megatron-core than the presets'."""
    ways = "--num-virtual-stages-per-pipeline-rank 2 --moe-token-dispatcher-type allgather --num-query-groups 4"
    recompute = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    run = profiles(
        8, *SMALL, *ways.split(), "--group-query-attention", *recompute.split(), "--transformer-impl", "local"
    )
    names = {operation for _, operation in operations(run)}
    assert "all_to_all_single" not in names
    blocks = pd.read_parquet(run / "tables/blocks.parquet")
    assert blocks["recompute"].any()


def test_the_last_stage_predicts_further_tokens(profiles: Profiles) -> None:
    """It embeds the tokens that come next, so it gets tokens in addition to labels."""
    flags = [flag for flag in SMALL if flag != "--sequence-parallel"]  # which local layers have not got there
    run = profiles(
        15, *flags, *shlex.split("--tensor-model-parallel-size 1 --transformer-impl local --mtp-num-layers 1")
    )
    assert layers(run).index.str.contains("mtp").any()
