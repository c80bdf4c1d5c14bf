"""How long an inference engine takes to answer a batch of prompts: its steps, and what each costs."""
