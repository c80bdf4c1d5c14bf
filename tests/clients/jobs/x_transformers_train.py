"""After x-transformers' train_enwik8.py: bytes, four micro-batches, validation and a sample of text in some iterations.

Runs on a GPU too. Bytes are random. The first iteration validates and generates, as the recipe's does.
"""

from __future__ import annotations

import torch
from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

ITERATIONS, BATCH, ACCUMULATION, LENGTH, GENERATED = 12, 4, 4, 1024, 64
VALIDATE_EVERY, GENERATE_EVERY = 100, 500


def main() -> None:
    """Train for some iterations."""
    model = TransformerWrapper(
        num_tokens=256,
        max_seq_len=LENGTH,
        attn_layers=Decoder(dim=512, depth=6, heads=8, rotary_pos_emb=True, attn_flash=True),
    )
    model = AutoregressiveWrapper(model).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    text = torch.randint(0, 256, (1 << 20,))

    def batch() -> torch.Tensor:
        starts = torch.randint(0, len(text) - LENGTH - 1, (BATCH,))
        return torch.stack([text[start : start + LENGTH + 1] for start in starts.tolist()]).cuda()

    for iteration in range(ITERATIONS):
        model.train()
        for _ in range(ACCUMULATION):
            loss = model(batch())
            (loss / ACCUMULATION).backward()
        print(f"training loss: {loss.item()}")
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        if iteration % VALIDATE_EVERY == 0:
            model.eval()
            with torch.no_grad():
                print(f"validation loss: {model(batch()).item()}")
        if iteration % GENERATE_EVERY == 0:
            model.eval()
            print(model.generate(prompts=batch()[:1, :LENGTH], seq_len=GENERATED, cache_kv=True).shape)


if __name__ == "__main__":
    main()
