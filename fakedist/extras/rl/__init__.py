"""Inference engines next to training: vLLM, SGLang and verl, what sleeps, and how long a rollout takes."""
