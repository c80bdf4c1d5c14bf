"""A step of GRPO in small: completions of a prompt are generated, scored, and trained on.

- a loop that gives the model a cache that grows, as transformers' ``generate()`` does;
- a loop without a cache: each forward has one token more;
- the log-probabilities of a reference model, without gradients.
"""

import torch
from torch import nn

VOCABULARY, WIDTH, SEQUENCES, PROMPT, NEW, OWN = 1024, 256, 4, 8, 6, 3


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, past_key_values: list[torch.Tensor] | None = None) -> torch.Tensor:
        hidden: torch.Tensor = self.mix(self.embed(input_ids))
        if past_key_values is not None:
            past_key_values[:] = [torch.cat([*past_key_values, hidden], 1)]
            hidden = hidden + past_key_values[0].mean(1, keepdim=True)
        logits: torch.Tensor = self.head(hidden)
        return logits


def sampled(logits: torch.Tensor) -> torch.Tensor:
    return logits[:, -1].softmax(-1).multinomial(1)


model, reference = Model().cuda(), Model().cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(4):
    tokens = torch.randint(0, VOCABULARY, (SEQUENCES, PROMPT), device="cuda")
    with torch.inference_mode():
        cache: list[torch.Tensor] = []
        new = sampled(model(tokens, past_key_values=cache))
        completion = [new]
        for _ in range(NEW - 1):
            new = sampled(model(new, past_key_values=cache))
            completion.append(new)
    tokens = torch.cat([tokens, *completion], 1)
    with torch.no_grad():
        known = reference(tokens).log_softmax(-1)
        own = tokens
        for _ in range(OWN):
            own = torch.cat([own, sampled(model(own))], 1)
    (model(tokens).log_softmax(-1) - known).exp().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
