from __future__ import annotations

import importlib.util
import sys
from math import comb

import numpy as np
import pytest
import torch

from fakedist.extras.experts.deep_ep_sizes import CONFIGS, Config, Layout, low_latency_bytes
from fakedist.extras.experts.stand_in import stand_in
from fakedist.world.arrivals import Arrivals
from fakedist.world.reroute import Device

#: What ``Config`` of the built extension of sgl-deep-ep 0.1.2.post1 answers, by ranks: its arguments, then bytes for
#: ranks of a node and for nodes with 14,336 bytes a token, and for ranks of a node with 2,000.
BUILT = {
    2: ((20, 24, 256, 6, 128), 83_927_552, 0, 20_767_232),
    8: ((20, 6, 256, 6, 128), 335_709_824, 0, 83_068_544),
    16: ((20, 36, 288, 20, 128), 377_673_984, 91_887_744, 93_452_544),
    64: ((20, 32, 288, 8, 128), 377_677_824, 336_047_360, 93_456_384),
    128: ((24, 20, 560, 12, 128), 881_247_360, 831_716_352, 218_064_000),
}
NOTHING = Device(lambda owner, num_bytes: 0, lambda address: None, lambda indices, num_experts: indices)


@pytest.mark.parametrize("ranks", BUILT)
def test_buffers_are_as_large_as_the_built_extension_says(ranks: int) -> None:
    arguments, nvl_bytes, rdma_bytes, narrow_bytes = BUILT[ranks]
    config = Config(*arguments)
    assert config.get_nvl_buffer_size_hint(14_336, ranks) == nvl_bytes
    assert config.get_rdma_buffer_size_hint(14_336, ranks) == rdma_bytes
    assert config.get_nvl_buffer_size_hint(2_000, ranks) == narrow_bytes
    assert CONFIGS[ranks][0] == arguments[1:]


def test_buffers_of_low_latency_kernels_are_too() -> None:
    assert low_latency_bytes(128, 7168, 8, 256) == 1_908_410_496
    assert low_latency_bytes(100, 2048, 64, 288) == 479_234_432


def test_tokens_go_once_to_each_rank_and_node() -> None:
    # 16 ranks with two experts each; ranks 0 to 7 are a node.
    experts = np.array([[0, 1, 2], [16, 30, -1], [6, 7, 31], [-1, -1, -1]])
    layout = Layout(experts, num_experts=32, rank=3, num_ranks=16)
    assert layout.per_rank.tolist() == [1, 1, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 2]
    assert layout.per_node.tolist() == [2, 2]
    assert layout.in_rank[2].nonzero()[0].tolist() == [3, 15]
    assert layout.mine.tolist() == [[0, 1, -1]]
    assert layout.num_received == 16 * 1
    assert layout.received.tolist() == [16, 16]
    assert layout.num_received_by_node == 2 * 2
    assert layout.exchanged(10) == (20, 20), "two tokens cross to the other node, each once"
    assert layout.exchanged_by_experts(10) == (20, 60), "low-latency kernels send a token to each of its experts"


def test_in_one_node_all_other_ranks_count() -> None:
    layout = Layout(np.array([[0, 1], [0, 2], [3, 2]]), num_experts=4, rank=0, num_ranks=4)
    assert layout.per_rank.tolist() == [2, 1, 2, 1]
    assert layout.exchanged(100) == (200, 400)
    assert layout.num_received == 4 * 2


def test_other_ranks_send_what_they_choose() -> None:
    every = [np.array([[0, 17], [2, 3]]), np.array([[1, 0], [1, 31]]), *[np.array([[30, 31]])] * 14]
    layout = Layout(every[0], 32, 0, 16, every)
    assert layout.received_experts is not None
    assert layout.received_experts.tolist() == [[0, -1], [1, 0], [1, -1]]
    assert (layout.num_received, layout.received.tolist()) == (3, [2, 2])
    assert layout.num_received_by_node == 2, "of its peers, ranks 0 and 8, rank 0 alone sends two tokens to this node"


def test_received_experts_are_those_of_my_tokens_again_and_again() -> None:
    output = torch.zeros(6, 2, dtype=torch.int64)
    Arrivals(0).repeat(output, torch.tensor([[1, -1], [0, 3]]))
    assert output.tolist() == [[1, -1], [0, 3]] * 3


def test_a_script_imports_the_stand_in_only_on_the_virtual_gpu() -> None:
    with stand_in(NOTHING) as found:
        buffer = importlib.import_module("deep_ep").Buffer
        assert importlib.import_module("deep_ep.utils").EventOverlap().event is None
        with pytest.raises(ImportError, match=r"no deep_ep\.ElasticBuffer: use deep_ep\.Buffer"):
            from deep_ep import ElasticBuffer  # noqa: F401
        assert importlib.import_module("deep_ep").HybridEPBuffer.__module__ == "deep_ep.buffer"
        buffer.set_num_sms(24)
        assert buffer.get_dispatch_config(8).num_sms == 24
        assert found() == [], "nothing made a buffer"
    assert "deep_ep" not in sys.modules


def test_parts_of_other_sizes_than_eight_ranks_may_share_nvlink() -> None:
    experts = np.array([[0, 5], [0, 1], [6, 7]])
    by_four = Layout(experts, num_experts=8, rank=1, num_ranks=8, node=4)
    assert by_four.per_node.tolist() == [2, 2]
    assert by_four.exchanged(10) == (20, 20), "two tokens cross, once each"
    assert Layout(experts, num_experts=8, rank=1, num_ranks=8).exchanged(10) == (20, 50)


def test_random_choices_reach_as_many_ranks_as_expected() -> None:
    chosen = np.stack([np.random.default_rng(row).choice(256, 8, replace=False) for row in range(4096)])
    layout = Layout(chosen, num_experts=256, rank=0, num_ranks=8)
    reached = 8 * (1 - comb(224, 8) / comb(256, 8))
    assert layout.per_rank.sum() / 4096 == pytest.approx(reached, rel=0.01)
