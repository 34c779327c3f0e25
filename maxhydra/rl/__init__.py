"""Reinforcement learning (GRPO and variants): rollouts, rewards, advantages and policy losses."""
