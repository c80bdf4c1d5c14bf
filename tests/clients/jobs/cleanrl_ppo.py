"""After CleanRL's ppo_atari_multigpu.py: ``cleanrl_ppo.py``, PPO in one file, gradients averaged by one ``all_reduce``.

Runs on GPUs too, under torchrun. Games are noise of Atari's shape, stepped on the host as Gymnasium's vector of
environments does.
"""

from __future__ import annotations

import os

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributions.categorical import Categorical

ENVS, ROLLOUT, MINIBATCHES, EPOCHS, ITERATIONS, ACTIONS = 8, 32, 4, 2, 3, 6
GAMMA, GAE_LAMBDA, CLIP, VALUE_COEF, ENTROPY_COEF, MAX_NORM = 0.99, 0.95, 0.1, 0.5, 0.01, 0.5


class Games:
    """Noise of 4 x 84 x 84 bytes, one in a hundred at its end."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)

    def reset(self) -> np.ndarray:
        """The first pictures."""
        return self.random.integers(0, 256, (ENVS, 4, 84, 84), dtype=np.uint8)

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Pictures, rewards, and which games ended."""
        assert actions.shape == (ENVS,)
        return self.reset(), self.random.choice([0.0, 1.0], ENVS), self.random.random(ENVS) < 0.01


def layer_init(layer: nn.Module, std: float = 2**0.5, bias_const: float = 0.0) -> nn.Module:
    """Orthogonal weights, constant biases."""
    nn.init.orthogonal_(layer.weight, std)
    nn.init.constant_(layer.bias, bias_const)
    return layer


class Agent(nn.Module):
    """The convolutions of Nature's DQN, an actor and a critic."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(
            layer_init(nn.Conv2d(4, 32, 8, stride=4)),
            nn.ReLU(),
            layer_init(nn.Conv2d(32, 64, 4, stride=2)),
            nn.ReLU(),
            layer_init(nn.Conv2d(64, 64, 3, stride=1)),
            nn.ReLU(),
            nn.Flatten(),
            layer_init(nn.Linear(64 * 7 * 7, 512)),
            nn.ReLU(),
        )
        self.actor = layer_init(nn.Linear(512, ACTIONS), std=0.01)
        self.critic = layer_init(nn.Linear(512, 1), std=1)

    def get_value(self, x: torch.Tensor) -> torch.Tensor:
        """The value that the critic expects."""
        return self.critic(self.network(x / 255.0))

    def get_action_and_value(
        self, x: torch.Tensor, action: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Actions, sampled unless they are known; their logarithmic probability, entropy, and the critic's value."""
        hidden = self.network(x / 255.0)
        probs = Categorical(logits=self.actor(hidden))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(hidden)


def all_reduce_gradients(agent: Agent, world_size: int) -> None:
    """Gradients of all parameters in one tensor, summed over ranks and put back."""
    gradients = torch.cat([param.grad.view(-1) for param in agent.parameters() if param.grad is not None])
    dist.all_reduce(gradients, op=dist.ReduceOp.SUM)
    offset = 0
    for param in agent.parameters():
        if param.grad is not None:
            param.grad.data.copy_(gradients[offset : offset + param.numel()].view_as(param.grad.data) / world_size)
            offset += param.numel()


def advantages_of(
    rewards: torch.Tensor, values: torch.Tensor, dones: torch.Tensor, last: torch.Tensor, last_done: torch.Tensor
) -> torch.Tensor:
    """Generalized advantage estimation, backwards through the rollout."""
    advantages = torch.zeros_like(rewards)
    running: torch.Tensor | float = 0.0
    for t in reversed(range(ROLLOUT)):
        goes_on = 1.0 - (last_done if t == ROLLOUT - 1 else dones[t + 1])
        following = last if t == ROLLOUT - 1 else values[t + 1]
        delta = rewards[t] + GAMMA * following * goes_on - values[t]
        advantages[t] = running = delta + GAMMA * GAE_LAMBDA * goes_on * running
    return advantages


def main() -> None:
    local_rank, world_size = int(os.getenv("LOCAL_RANK", "0")), int(os.getenv("WORLD_SIZE", "1"))
    if world_size > 1:
        dist.init_process_group("nccl")
    device = torch.device(f"cuda:{local_rank}")
    torch.cuda.set_device(device)
    seed = 1 + int(os.getenv("RANK", "0"))
    np.random.seed(seed)
    torch.manual_seed(1)
    games = Games(seed)
    agent = Agent().to(device)
    torch.manual_seed(seed)
    optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)
    obs = torch.zeros((ROLLOUT, ENVS, 4, 84, 84)).to(device)
    actions, logprobs, rewards, dones, values = (torch.zeros((ROLLOUT, ENVS)).to(device) for _ in range(5))
    next_obs, next_done = torch.Tensor(games.reset()).to(device), torch.zeros(ENVS).to(device)
    for iteration in range(1, ITERATIONS + 1):
        for step in range(ROLLOUT):
            obs[step], dones[step] = next_obs, next_done
            with torch.no_grad():
                action, logprob, _, value = agent.get_action_and_value(next_obs)
                values[step] = value.flatten()
            actions[step], logprobs[step] = action, logprob
            pictures, reward, ended = games.step(action.cpu().numpy())
            rewards[step] = torch.tensor(reward).to(device).view(-1)
            next_obs, next_done = torch.Tensor(pictures).to(device), torch.Tensor(ended).to(device)
        with torch.no_grad():
            last = agent.get_value(next_obs).reshape(1, -1)
            advantages = advantages_of(rewards, values, dones, last, next_done)
            returns = advantages + values
        b_obs, b_actions = obs.reshape(-1, 4, 84, 84), actions.reshape(-1)
        b_logprobs, b_advantages, b_returns = logprobs.reshape(-1), advantages.reshape(-1), returns.reshape(-1)
        indices = np.arange(ROLLOUT * ENVS)
        clip_fractions: list[float] = []
        for _ in range(EPOCHS):
            np.random.shuffle(indices)
            for mb in np.split(indices, MINIBATCHES):
                _, newlogprob, entropy, newvalue = agent.get_action_and_value(b_obs[mb], b_actions.long()[mb])
                ratio = (newlogprob - b_logprobs[mb]).exp()
                with torch.no_grad():
                    clip_fractions += [((ratio - 1.0).abs() > CLIP).float().mean().item()]
                mb_advantages = b_advantages[mb]
                mb_advantages = (mb_advantages - mb_advantages.mean()) / (mb_advantages.std() + 1e-8)
                clipped = torch.clamp(ratio, 1 - CLIP, 1 + CLIP)
                policy_loss = torch.max(-mb_advantages * ratio, -mb_advantages * clipped).mean()
                value_loss = 0.5 * ((newvalue.view(-1) - b_returns[mb]) ** 2).mean()
                loss = policy_loss - ENTROPY_COEF * entropy.mean() + value_loss * VALUE_COEF
                optimizer.zero_grad()
                loss.backward()
                if world_size > 1:
                    all_reduce_gradients(agent, world_size)
                nn.utils.clip_grad_norm_(agent.parameters(), MAX_NORM)
                optimizer.step()
        print(f"iteration {iteration}: {len(clip_fractions)} updates")


if __name__ == "__main__":
    main()
