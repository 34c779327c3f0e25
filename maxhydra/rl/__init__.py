"""Reinforcement learning: rewards, advantages, rollouts and the losses over them."""
