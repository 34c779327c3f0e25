"""Fields of task=serve."""

from collections.abc import Iterator

from maxhydra.config.declare import option, schema, section
from maxhydra.config.errors import Problem
from maxhydra.config.schema.decode import Engine, Sampling
from maxhydra.config.schema.model import Model
from maxhydra.config.schema.run import Task


@schema
class ServeTask(Task):
    """Serves a model over an OpenAI-compatible HTTP API."""

    host: str = "127.0.0.1"
    """Address to listen on; 127.0.0.1 accepts only local clients, 0.0.0.0 listens on all interfaces."""
    port: int = option(8000, ge=0, le=65535)
    """Port to listen on; 0 picks a free one."""
    model_name: str | None = None
    """Model name that clients use. null: the chosen option of the config group model."""
    api_key_env: str | None = None
    """Environment variable with the API key that requests must send. null: no key is required."""
    queue: int = option(256, ge=0)
    """Sequences that may wait in addition to the task.engine.max_batch running ones; beyond that, requests get status
    429."""
    max_samples: int = option(16, ge=1)
    """Maximum number of sequences per request: n times the number of prompts."""
    max_body_mib: float = option(4.0, gt=0)
    """Maximum size of a request body, in MiB."""
    max_connections: int = option(1024, ge=1)
    """Maximum number of open connections."""
    timeout: float = option(30.0, gt=0)
    """Seconds that a client may take to send a request or to read a response."""
    keep_alive: float = option(75.0, gt=0)
    """Seconds that an idle connection stays open between requests."""
    drain: float = option(10.0, ge=0)
    """Seconds that running requests may take to finish after SIGTERM, SIGUSR1 or Ctrl-C; then they are cancelled."""
    sampling: Sampling = section(Sampling)
    engine: Engine = section(Engine)

    def check(self) -> Iterator[Problem]:
        if "" in self.sampling.stop:
            yield Problem("sampling.stop", "contains an empty string", value=self.sampling.stop)
        if self.max_samples > self.engine.max_batch + self.queue:
            reason = f"exceeds engine.max_batch + queue = {self.engine.max_batch + self.queue}, so it can never fit"
            yield Problem("max_samples", reason, value=self.max_samples)

    def check_model(self, model: Model) -> Iterator[Problem]:
        yield from self.engine.check_model(model)
