"""DeepEP's dispatch and combine, forward and backward as Megatron-LM's flex dispatcher calls them, and HybridEP's."""

from __future__ import annotations

import pytest

from tests.support.runs import Profiled, ProfileOnce

MIB = 1 << 20
TOKENS, HIDDEN, EXPERTS, TOPK, SMS = 1024, 2048, 128, 8, 24
JOB = f"""
import os
import torch
import torch.distributed as dist
from deep_ep import Buffer
from deep_ep.utils import EventHandle, EventOverlap

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
group, ranks = dist.group.WORLD, dist.get_world_size()
Buffer.set_num_sms({SMS})
configs = Buffer.get_dispatch_config(ranks), Buffer.get_combine_config(ranks)
buffer = Buffer(
    group,
    max(config.get_nvl_buffer_size_hint({2 * HIDDEN}, ranks) for config in configs),
    max(config.get_rdma_buffer_size_hint({2 * HIDDEN}, ranks) for config in configs),
)
later = dict(async_finish=True, allocate_on_comm_stream=True)


def previous():
    return EventOverlap(EventHandle())


class Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, indices, probs):
        per_rank, per_node, per_expert, in_rank, event = buffer.get_dispatch_layout(
            indices, {EXPERTS}, previous_event=previous(), **later
        )
        got, got_indices, got_probs, counts, ctx.handle, event = buffer.dispatch(
            x, topk_idx=indices, topk_weights=probs, num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank, num_tokens_per_expert=per_expert, previous_event=event, **later,
        )
        event.current_stream_wait()
        print("COUNTS", sum(counts), int(per_expert.sum()), int((got_indices >= 0).sum()), flush=True)
        print("SENT", int(in_rank.sum()), per_rank[dist.get_rank()].item() * ranks, len(got), flush=True)
        return got, got_indices, got_probs, ctx.handle

    @staticmethod
    def backward(ctx, gradient, indices, probs, handle):
        x, probs, event = buffer.combine(
            gradient.contiguous(), ctx.handle, topk_weights=probs.float(), previous_event=previous(), **later
        )
        event.current_stream_wait()
        return x, None, probs


class Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, handle):
        ctx.handle = handle
        combined, _, event = buffer.combine(x, handle, previous_event=previous(), **later)
        event.current_stream_wait()
        return combined

    @staticmethod
    def backward(ctx, gradient):
        x, _, _, _, _, event = buffer.dispatch(
            gradient.contiguous(), handle=ctx.handle, previous_event=previous(), **later
        )
        event.current_stream_wait()
        return x, None


router = torch.nn.Linear({HIDDEN}, {EXPERTS}, bias=False, device="cuda", dtype=torch.bfloat16)
optimizer = torch.optim.SGD(router.parameters(), lr=0.1)
for _ in range(3):
    x = torch.randn({TOKENS}, {HIDDEN}, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    probs, indices = torch.topk(router(x).float().softmax(-1), {TOPK}, dim=-1)
    got, got_indices, got_probs, handle = Dispatch.apply(x, indices, probs)
    out = Combine.apply(got * got_probs.sum(-1, keepdim=True).to(got.dtype), handle)
    assert out.shape == x.shape
    out.sum().backward()
    assert x.grad.shape == x.shape
    optimizer.step()
    optimizer.zero_grad()
"""
LOW_LATENCY = f"""
import os
import torch
import torch.distributed as dist
import deep_ep

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
tokens = 128
num_bytes = deep_ep.Buffer.get_low_latency_rdma_size_hint(tokens, {HIDDEN}, 16, {EXPERTS})
free = torch.cuda.mem_get_info()[0]
buffer = deep_ep.Buffer(
    dist.group.WORLD, 0, num_bytes, low_latency_mode=True, num_qps_per_rank={EXPERTS} // 16, explicitly_destroy=True
)
x = torch.randn(64, {HIDDEN}, device="cuda", dtype=torch.bfloat16)
weights, indices = torch.topk(torch.rand(64, {EXPERTS}, device="cuda"), {TOPK})
(got, scales), count, handle, event, hook = buffer.low_latency_dispatch(
    x, indices, tokens, {EXPERTS}, return_recv_hook=True
)
hook()
print("GOT", tuple(got.shape), got.dtype, tuple(scales.shape), count.sum().item() % 16)
out, event, hook = buffer.low_latency_combine(
    torch.zeros(got.shape, dtype=torch.bfloat16, device="cuda"), indices, weights, handle, async_finish=True
)
event.current_stream_wait()
print("OUT", tuple(out.shape), num_bytes, tuple(buffer.get_next_low_latency_combine_buffer(handle).shape))
buffer.destroy()
print("LEFT", free - torch.cuda.mem_get_info()[0] - torch.cuda.memory_reserved())
hybrid = deep_ep.HybridEPBuffer(
    group=dist.group.WORLD, hidden_dim={HIDDEN}, max_num_of_tokens_per_rank={TOKENS}, num_local_experts={EXPERTS} // 16,
    num_sms_dispatch_api=16, num_sms_combine_api=16,
)
x = torch.randn({TOKENS}, {HIDDEN}, device="cuda", dtype=torch.bfloat16)
weights, indices = torch.topk(torch.rand({TOKENS}, {EXPERTS}, device="cuda"), {TOPK})
same = dict(pad_multiple=96)
got, probs, _, counts, handle = hybrid.dispatch_with_permute(
    hidden=x, topk_idx=indices, topk_weights=weights, num_of_experts={EXPERTS}, **same
)
again, *_ = hybrid.dispatch_with_permute(hidden=x, handle=handle, num_permuted_tokens=counts.sum(), **same)
back, back_probs = hybrid.combine_with_unpermute(hidden=got, probs=probs, handle=handle, **same)
print("EACH", *counts.tolist())
print("PERMUTED", int(counts.sum()), len(got), len(probs), len(again), *back.shape, *back_probs.shape)
mask = torch.zeros({TOKENS}, {EXPERTS}, dtype=torch.bool, device="cuda").scatter(1, indices, True)
plain, *_, other = hybrid.dispatch(x, routing_map=mask)
print("PLAIN", handle[3].item(), other[3].item(), *plain.shape, *hybrid.combine(plain, handle=other)[0].shape)
"""


def _said(profiled: Profiled, word: str) -> list[int]:
    line = next(line for line in profiled.finished.stderr.splitlines() if line.startswith(word))
    return [int(number) for number in line.split()[1:]]


def _granules(num_bytes: int) -> int:
    return -(-num_bytes // (2 * MIB)) * 2 * MIB


@pytest.fixture(scope="module")
def one_node(profile_once: ProfileOnce, tmp_path_factory: pytest.TempPathFactory) -> Profiled:
    script = tmp_path_factory.mktemp("job") / "dispatched.py"
    script.write_text(JOB)
    return profile_once(script, rank=3)


@pytest.fixture(scope="module")
def two_nodes(profile_once: ProfileOnce, tmp_path_factory: pytest.TempPathFactory) -> Profiled:
    script = tmp_path_factory.mktemp("job") / "dispatched.py"
    script.write_text(JOB)
    return profile_once(script, world_size=16, rank=9)


def test_every_expert_gets_its_tokens(one_node: Profiled) -> None:
    received, sent, marked = _said(one_node, "COUNTS")
    assert received == sent == marked == TOKENS * TOPK
    to_ranks, expected, got = _said(one_node, "SENT")
    assert expected == got
    assert TOKENS * 5 < to_ranks < TOKENS * 6, "8 random experts of 128 are on 5.3 of 8 ranks"


def test_buffers_are_outside_the_allocator_by_owner(one_node: Profiled, two_nodes: Profiled) -> None:
    slots, token = SMS // 2 * 8, 2 * HIDDEN + 8 + 128 * (8 + 4 + 4)
    in_node = slots * 256 * token + slots * 5 * 4 + 160
    workspace = {"extensions": 32 * MIB}
    assert one_node.summary["estimated_outside"]["taken"] == {"user buffers": _granules(in_node), **workspace}
    over_nodes = slots * 288 * token + slots * 7 * 4 + 160
    expected = {"user buffers": _granules(over_nodes), "NVSHMEM heap": 512 * MIB, **workspace}
    assert two_nodes.summary["estimated_outside"]["taken"] == expected


def test_calls_say_what_is_sent_to_others(one_node: Profiled, two_nodes: Profiled) -> None:
    token = HIDDEN * 2
    for profiled, low, high in ((one_node, 4.4, 5.2), (two_nodes, 0.95, 1.01)):
        calls = profiled.table("calls")
        calls = calls[calls["step"] == 2]
        assert calls["operation"].tolist() == [
            "deep_ep_layout",
            *[f"deep_ep_{kind}_{SMS}sms" for kind in ("dispatch", "combine", "dispatch", "combine")],
        ]
        moved = calls[calls["operation"] != "deep_ep_layout"]
        got = _said(profiled, "SENT")[2]
        assert moved["bytes_in"].tolist() == [TOKENS * token, got * token, TOKENS * token, got * token]
        assert moved["bytes_out"].tolist() == [got * token, TOKENS * token, got * token, TOKENS * token]
        assert moved["exchanged_bytes"].between(low * TOKENS * token, high * TOKENS * token).all()


def test_the_step_has_their_time(one_node: Profiled, two_nodes: Profiled) -> None:
    for profiled, bandwidth in ((one_node, 450e3), (two_nodes, 50e3)):
        rows = profiled.table("kernels")
        rows = rows[rows["name"].astype(str).str.startswith("deep_ep_dispatch")]
        calls = profiled.table("calls")
        sent = calls.loc[(calls["step"] == 2) & (calls["exchanged_bytes"] > 0), "exchanged_bytes"]
        least_us = float(sent.min()) / bandwidth
        assert len(rows) == 2
        assert rows["duration_us"].between(least_us, 4 * least_us + 100).all()


def test_the_report_names_the_stand_in_and_what_it_follows(one_node: Profiled) -> None:
    assert "deepseek-ai/DeepEP @5996f70a" in one_node.note("deep_ep_stands_in")


@pytest.fixture(scope="module")
def both(profile_once: ProfileOnce, tmp_path_factory: pytest.TempPathFactory) -> Profiled:
    script = tmp_path_factory.mktemp("job") / "low_latency.py"
    script.write_text(LOW_LATENCY)
    return profile_once(script, world_size=16, options=("--json", "--no-kernels"))


def test_low_latency_kernels_have_room_for_all_that_could_come(both: Profiled) -> None:
    said = both.finished.stderr
    assert f"GOT (8, 2048, {HIDDEN}) torch.float8_e4m3fn (8, 2048, {HIDDEN // 128}) 0" in said, said
    assert f"OUT (64, {HIDDEN})" in said
    assert "(8, 2048, 2048)" in said
    assert "LEFT 0" in said
    operations = both.table("calls")["operation"].astype(str).tolist()
    assert [name for name in operations if "deep_ep" in name] == [
        "deep_ep_low_latency_dispatch",
        "deep_ep_low_latency_combine",
    ]
    heap = both.summary["estimated_outside"]["taken"]["NVSHMEM heap"]
    # Two buffers to send from and two to receive in, 128 tokens of 128 experts, with scales; a part of NVSHMEM's own.
    whole = 4 * 128 * 128 * (2 * HIDDEN + 4 * HIDDEN // 128)
    assert heap == -(-(whole + (256 << 20)) // (512 << 20)) * (512 << 20)


def test_hybrid_ep_gives_experts_their_tokens_one_after_the_other(both: Profiled) -> None:
    counted, got, probs, again, *back = _said(both, "PERMUTED")
    assert counted == got == probs == again
    assert back == [TOKENS, HIDDEN, TOKENS, EXPERTS]
    received, by_mask, *plain = _said(both, "PLAIN")
    assert received == by_mask, "a mask of experts says what their indices do"
    assert plain == [received, HIDDEN, TOKENS, HIDDEN]
    assert [count % 96 for count in _said(both, "EACH")] == [0] * (EXPERTS // 16)
    assert received % 16 == 0, "each rank sends as many"
    assert TOKENS * 6 < received < TOKENS * TOPK, "8 random experts of 128 are on 6.6 of 16 ranks"
    assert received < got < received * 1.4, "few tokens have two experts here"


def test_hybrid_ep_takes_its_buffers_and_says_what_crosses_the_network(both: Profiled) -> None:
    slots, probs, experts = TOKENS * 16, EXPERTS // 2 * 4, EXPERTS // 16
    mapped = [slots * HIDDEN * 2, slots * probs, slots * HIDDEN // 128 * 4, 512, 16 * experts * slots]
    flags = [4, 4]  # of the first rank of a node
    token, scales = TOKENS * HIDDEN * 2, TOKENS * HIDDEN // 128 * 4
    ring = 4096 * 64  # 3 of a token to dispatch, 2 to combine, and one more
    small = 108 * 8 * 8 + 4096 + 5 * TOKENS * probs + 2 * scales + 4 * 8 * 8 + 2 * 16 * (2 * ring + 4096)
    taken = both.summary["estimated_outside"]["taken"]
    assert taken["user buffers"] == sum(map(_granules, (*mapped, *flags)))
    assert taken["extensions"] == 4 * _granules(token) + _granules(small) > 32 * MIB, "DeepEP's was freed before"
    calls = both.table("calls")
    sent = calls[calls["operation"].astype(str).str.fullmatch(r"hybrid_ep_(dispatch|combine)_16sms")]
    # One other node, which nearly every token has an expert on, of bf16 and where they are given all probabilities.
    per_token = [2 * HIDDEN + part for part in (probs, 0, probs, 0, 0)]
    assert (sent["exchanged_bytes"] / per_token).between(0.99 * TOKENS, TOKENS).all()
    assert "deep_ep.HybridEPBuffer is a stand-in that follows deepseek-ai/DeepEP @2540b8ab" in str(
        both.summary["notes"]
    )
