"""One step with attentions of several masks: whole in Python, compiled, made by hand in a compiled graph, made up.

Prints the counts of each mask, and those of the same mask made by torch on the host.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention.flex_attention import (
    BlockMask,
    and_masks,
    create_block_mask,
    flex_attention,
    noop_mask,
    or_masks,
)

TOKENS, BLOCK, HEADS, WIDTH, WINDOW = 4096, 128, 2, 64, 512
BLOCKS = TOKENS // BLOCK


def mask_mods(device: str) -> dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]]:
    drawn = torch.rand(TOKENS, generator=torch.Generator().manual_seed(1))
    ends = (drawn < 1 / WINDOW).to(device)
    docs, even = ends.cumsum(0), torch.arange(TOKENS, device=device) // WINDOW

    def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q >= k

    def window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q - k < WINDOW

    def prefix(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return k < WINDOW

    def documents(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (docs[q] == docs[k]) & (q >= k)

    def even_documents(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (even[q] == even[k]) & (q >= k)

    return {
        "causal": causal,
        "window": and_masks(causal, window),
        "prefix": and_masks(or_masks(prefix, causal), noop_mask),
        "documents": documents,
        "compiled": even_documents,
    }


def by_hand(tokens: Tensor, window: Tensor) -> BlockMask:
    """As the nanoGPT speedruns do, from documents that token 0 ends."""
    docs = (tokens == 0).cumsum(0)
    low, high = docs.view(-1, BLOCK)[:, 0].contiguous(), docs.view(-1, BLOCK)[:, -1].contiguous()
    key = torch.arange(BLOCKS, dtype=torch.int32, device=tokens.device)
    query = key[:, None]
    near = (query >= key) & (query - key < window) & (low[:, None] <= high) & (low <= high[:, None])
    full = (query > key) & (query - key < window) & (low[:, None] == high) & (low == high[:, None])

    def ordered(dense: Tensor) -> tuple[Tensor, Tensor]:
        indices = dense.argsort(dim=-1, descending=True, stable=True).to(torch.int32)
        return dense.sum(dim=-1, dtype=torch.int32)[None, None].contiguous(), indices[None, None].contiguous()

    def documents(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (docs[q] == docs[k])

    return BlockMask.from_kv_blocks(*ordered(near & ~full), *ordered(full), BLOCK_SIZE=BLOCK, mask_mod=documents)


def only(chosen: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    return lambda b, h, q, k: chosen[k] & (q >= k)


def counts(mask: BlockMask) -> list[list[int]]:
    assert mask.full_kv_num_blocks is not None
    return [mask.kv_num_blocks.flatten().tolist(), mask.full_kv_num_blocks.flatten().tolist()]


def attend(x: Tensor, mask: BlockMask) -> Tensor:
    return flex_attention(x, x, x, block_mask=mask)  # type: ignore[return-value]


def attend_by_hand(x: Tensor, tokens: Tensor, window: Tensor) -> Tensor:
    return attend(x, by_hand(tokens, window))


def main() -> None:
    dist.init_process_group("nccl")
    tokens = torch.randint(0, WINDOW, (TOKENS,), generator=torch.Generator().manual_seed(2), dtype=torch.int32)
    window = torch.tensor(5, dtype=torch.int32)
    expected = {
        name: create_block_mask(mod, None, None, TOKENS, TOKENS, "cpu") for name, mod in mask_mods("cpu").items()
    }
    expected["by hand"] = by_hand(tokens, window)

    linear = nn.Linear(HEADS * WIDTH, HEADS * WIDTH, bias=False).to("cuda", torch.bfloat16)
    optimizer = torch.optim.SGD(linear.parameters(), lr=1e-3)
    compiled, compiled_by_hand = torch.compile(attend), torch.compile(attend_by_hand)
    on_device = tokens.to("cuda"), window.to("cuda")
    mods = mask_mods("cuda")
    masks: dict[str, BlockMask] = {}
    for _ in range(2):
        for name, mod in mods.items():
            make = torch.compile(create_block_mask) if name == "compiled" else create_block_mask
            masks[name] = make(mod, None, None, TOKENS, TOKENS, device="cuda")
        x = linear(torch.randn(TOKENS, HEADS * WIDTH, device="cuda", dtype=torch.bfloat16))
        chosen = x.float().square().mean(-1) > 1  # of values that no kernel computes
        masks["made up"] = create_block_mask(only(chosen), None, None, TOKENS, TOKENS, "cuda")
        for mask in masks.values():
            mask.mask_mod = noop_mask  # one compiled graph for all
        x = x.view(1, TOKENS, HEADS, WIDTH).transpose(1, 2)
        loss = sum((compiled(x, mask).float().sum() for mask in masks.values()), torch.zeros((), device="cuda"))
        loss = loss + compiled_by_hand(x, *on_device).float().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    masks["by hand"] = torch.compile(by_hand)(*on_device)
    found = {name: counts(mask) for name, mask in masks.items() if name != "made up"}
    print("MASKS", json.dumps([found, {name: counts(mask) for name, mask in expected.items()}]), flush=True)


main()
