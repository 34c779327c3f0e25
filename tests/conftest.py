"""Eight simulated CPU devices for every test, set before jax is imported; meshes are built over `jax.devices()[:n]`."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
