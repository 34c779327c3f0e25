"""task=serve: an OpenAI-compatible HTTP server, until it receives a signal."""

import asyncio
import contextlib
import dataclasses
import ipaddress
import logging
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from contextlib import closing
from functools import partial

import jax

from maxhydra.config import Config, ConfigError, Problem
from maxhydra.config.schema.decode import Engine as EngineConfig
from maxhydra.config.schema.hardware import Platform
from maxhydra.config.schema.model import Head
from maxhydra.config.schema.tasks.inference import ServeTask
from maxhydra.decode.engine import Engine
from maxhydra.decode.open import open_adapters, open_engine, open_prompts, read_adapter_weights
from maxhydra.decode.openai_server import (
    Access,
    AdapterRoutes,
    Backend,
    EncoderSettings,
    HttpSettings,
    Limits,
    LocalClient,
    ProcessManager,
    ServerDefaults,
    Service,
    ServiceSettings,
    allow_connections,
    listen,
    serve,
)
from maxhydra.decode.sampling_params import PromptEncoder
from maxhydra.runtime import signals
from maxhydra.runtime.channel import is_main
from maxhydra.runtime.profiler import Profiler
from maxhydra.tasks import Job, Outcome

NEEDS_DEVICES = True
KEEPS_RUN = False
# Of an accelerator's host, whose other cores run the engine, its compiler and the readers of media.
CORES_PER_PROCESS, MAX_PROCESSES = 4, 2
log = logging.getLogger("maxhydra")


def run(job: Job) -> Outcome:
    config, task = job.config, job.config.task
    assert isinstance(task, ServeTask)
    prompts = open_prompts(config)
    is_reward_model = config.model.head is Head.score
    warms_up = job.machine.hardware.platform is not Platform.cpu if task.engine.warm_up is None else task.engine.warm_up
    engine_config = dataclasses.replace(task.engine, warm_up=warms_up and not is_reward_model)
    if not is_main():
        return _follow(config, engine_config, prompts)
    key = _read_api_key(task)
    allow_connections(task.max_connections)
    # Bind the port before loading the weights, which may take minutes.
    listener = listen(task.host, task.port)
    is_local = ipaddress.ip_address(listener.getsockname()[0]).is_loopback
    if not is_local and key is None:
        log.warning("anyone who can reach %s can use this server: set task.api_key_env to require a key", task.host)
    name = task.model_name or job.choices.get("model", "model")
    settings = _settings(config, prompts, Access(key, is_local=is_local), name)
    count = _num_http_processes(task, job.machine.hardware.platform)
    with contextlib.ExitStack() as stack:
        profiler = Profiler(config.profile, job.run.path)
        stack.callback(profiler.close)
        # The processes load the tokenizer while this one loads the weights.
        manager = stack.enter_context(ProcessManager(count, listener, settings)) if count else None
        engine, adapters = _open(config, engine_config, prompts, name, profiler=profiler)
        stack.callback(engine.close)
        backend = Backend(engine, adapters=adapters, profiler=profiler)
        if manager is None:
            service = stack.enter_context(closing(Service(LocalClient(backend), prompts, settings.service)))
            serving = partial(serve, listener, service, settings.limits)
        else:
            serving = partial(manager.run, backend)
        asyncio.run(_serve_until_signal(serving, partial(_announce, name, listener)))
    return Outcome("finished", "stopped by a signal")


def _settings(config: Config, prompts: PromptEncoder, access: Access, name: str) -> HttpSettings:
    task = config.task
    assert isinstance(task, ServeTask)
    context = task.engine.max_context or config.model.context_length
    vocab_size = config.model.vocab_size
    service = ServiceSettings(
        ServerDefaults(name, task.sampling, task.max_samples, vocab_size, context, task.has_adapters),
        access,
        max_sequences=task.engine.max_batch + task.queue,
        seed=config.run.seed,
        has_live_adapters=task.lora.live,
        # An engine of several processes takes part in collective calls only.
        pooling=task.pooling if jax.process_count() == 1 else None,
        is_reward_model=config.model.head is Head.score,
    )
    limits = Limits(
        max_body=int(task.max_body_mib * 2**20),
        max_connections=task.max_connections,
        timeout=task.timeout,
        keep_alive=task.keep_alive,
        drain=task.drain,
    )
    return HttpSettings(EncoderSettings.of(prompts), service, limits)


def _num_http_processes(task: ServeTask, platform: Platform) -> int:
    """Number of processes of the HTTP server; 0: it runs in this one."""
    if task.http_processes is not None:
        return task.http_processes
    cores = os.cpu_count() or 1
    return 0 if platform is Platform.cpu else min(cores // CORES_PER_PROCESS, MAX_PROCESSES)


def _open(
    config: Config, engine_config: EngineConfig, prompts: PromptEncoder, name: str, *, profiler: Profiler | None = None
) -> tuple[Engine, AdapterRoutes | None]:
    """Start the engine and load its adapters; a mistake in one of them is reported before the weights are loaded."""
    task = config.task
    assert isinstance(task, ServeTask)
    if (reader := open_adapters(config)) is None:
        return open_engine(config, engine_config, prompts, profiler=profiler), None
    if name in task.adapters:
        raise ConfigError(Problem("task.adapters", "has the name of the model", value=name, hint="set task.model_name"))
    if task.lora.live and jax.process_count() > 1:
        reason = "is not supported with several processes"
        raise ConfigError(Problem("task.lora.live", reason, value=True, accepted="false; name them in task.adapters"))
    read = partial(read_adapter_weights, config, reader)
    weights = {each: read(f"task.adapters.{each}", location) for each, location in task.adapters.items()}
    engine = open_engine(config, engine_config, prompts, profiler=profiler, adapters=reader.limits)
    for each, location in task.adapters.items():
        engine.load_adapter(each, location, weights.pop(each))
    return engine, AdapterRoutes(engine, partial(read, "lora_path"), model=name, is_live=task.lora.live)


def _follow(config: Config, engine: EngineConfig, prompts: PromptEncoder) -> Outcome:
    """Decode the requests of the server, which runs in process 0, until it has finished the last one.

    A launcher sends SIGTERM to all processes: this one waits for process 0, unless it gets a second signal.
    """
    with signals.Deferral() as deferral:
        deferral.start()
        _open(config, engine, prompts, name="")[0].follow()
        signals.dismiss()
    return Outcome("finished", "stopped by process 0")


async def _serve_until_signal(serving: Callable[..., Awaitable[None]], announce: Callable[[], None]) -> None:
    """Serve until SIGTERM, SIGUSR1, SIGHUP or Ctrl-C, then finish running requests; a second signal stops at once."""
    stop, stop_now = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    # A SIGHUP that is ignored (nohup) stays ignored.
    hangup = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, *hangup):
        loop.add_signal_handler(number, lambda: (stop_now if stop.is_set() else stop).set())
    work = asyncio.ensure_future(serving(stop=stop, on_serving=announce))
    second_signal = asyncio.ensure_future(stop_now.wait())
    await asyncio.wait({work, second_signal}, return_when=asyncio.FIRST_COMPLETED)
    if work.done():
        work.result()


def _announce(name: str, listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    print(f"serving {name} on http://{f'[{host}]' if ':' in host else host}:{port}/v1", flush=True)


def _read_api_key(task: ServeTask) -> str | None:
    """Return the API key, which is only ever passed in the environment."""
    if task.api_key_env is None:
        return None
    key = os.environ.get(task.api_key_env, "").strip()
    if not key:
        reason = "names an environment variable that is unset or empty"
        raise ConfigError(Problem("task.api_key_env", reason, value=task.api_key_env))
    return key
