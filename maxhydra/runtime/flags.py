"""Environment variables with XLA flags and the platform, which jax reads once, when the backend starts."""

from collections.abc import Mapping

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema.hardware import Hardware, Platform
from maxhydra.runtime.detect import JAX_NAMES

# The CPU backend stays available for host-side arrays; the first name is the default backend.
JAX_PLATFORMS = {Platform.cpu: "cpu", Platform.gpu: "cuda,cpu", Platform.tpu: "tpu,cpu"}


def merge_flags(flags: list[str], existing: str) -> str:
    """Add flags to those of an environment variable, which take precedence."""
    existing_names = {_name(flag) for flag in existing.split()}
    return " ".join([*(flag for flag in flags if _name(flag) not in existing_names), *existing.split()])


def override_flags(flags: list[str], others: list[str]) -> list[str]:
    """Add `others` to the flags, replacing flags of the same name."""
    return merge_flags(flags, " ".join(others)).split()


def backend_environment(hardware: Hardware, env: Mapping[str, str]) -> dict[str, str]:
    """Environment variables to set before the backend starts."""
    invalid = [flag for flag in hardware.xla_flags if not flag.startswith("--xla_") or " " in flag]
    if invalid:
        reason = f"{invalid[0]!r} is not an XLA flag"
        raise ConfigError(
            Problem("hardware.xla_flags", reason, value=hardware.xla_flags, accepted="--xla_name=value, ...")
        )
    variables = {"JAX_PLATFORMS": _platforms(hardware.platform, env.get("JAX_PLATFORMS", ""))}
    name = "LIBTPU_INIT_ARGS" if hardware.platform is Platform.tpu else "XLA_FLAGS"
    flags = list(hardware.xla_flags)
    if hardware.simulated_devices is not None:
        flags.append(f"--xla_force_host_platform_device_count={hardware.simulated_devices}")
    if merged := merge_flags(flags, env.get(name, "")):
        variables[name] = merged
    return variables


def flags_in_effect(env: Mapping[str, str]) -> tuple[str, ...]:
    """All XLA flags that the backend reads."""
    return tuple(f"{env.get('XLA_FLAGS', '')} {env.get('LIBTPU_INIT_ARGS', '')}".split())


def _platforms(platform: Platform, existing: str) -> str:
    """JAX_PLATFORMS for a platform; ConfigError if it is already set and starts with another platform."""
    if not existing:
        return JAX_PLATFORMS[platform]
    if JAX_NAMES.get(existing.split(",")[0]) is not platform:
        raise ConfigError(
            Problem(
                "hardware.platform",
                f"the environment sets JAX_PLATFORMS={existing}",
                value=platform.value,
                hint="unset JAX_PLATFORMS, or choose hardware=auto to follow it",
            )
        )
    return existing


def _name(flag: str) -> str:
    return flag.split("=")[0]
