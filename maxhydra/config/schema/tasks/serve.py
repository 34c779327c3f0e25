"""Fields of task=serve."""

from collections.abc import Iterator

from maxhydra.config.declare import option, schema, section
from maxhydra.config.errors import Problem
from maxhydra.config.schema.decode import Engine, Sampling
from maxhydra.config.schema.model import Model
from maxhydra.config.schema.run import Task


@schema
class ServeTask(Task):
    """Serves a model over HTTP, with the paths and fields of OpenAI's interface."""

    host: str = "127.0.0.1"
    """Address to listen on; 127.0.0.1 is this machine alone, 0.0.0.0 every network it is on."""
    port: int = option(8000, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""
    model_name: str | None = None
    """The model's name in requests. null: the option of the group model."""
    api_key_env: str | None = None
    """Environment variable that holds the key which requests must carry. null: no key is asked for."""
    queue: int = option(256, ge=0)
    """Sequences that may wait besides the task.engine.max_batch under way; a request over it gets status 429."""
    max_samples: int = option(16, ge=1)
    """Sequences that one request may ask for: n times its prompts."""
    max_body_mib: float = option(4.0, gt=0)
    """Longest body of a request, in MiB."""
    max_connections: int = option(1024, ge=1)
    """Connections at a time."""
    timeout: float = option(30.0, gt=0)
    """Seconds that a client may take to send a request, and to take in what it is sent."""
    keep_alive: float = option(75.0, gt=0)
    """Seconds that a connection may stay open between two requests."""
    drain: float = option(10.0, ge=0)
    """Seconds that requests under way get to finish after SIGTERM, SIGUSR1 or Ctrl-C; then they are cancelled."""
    sampling: Sampling = section(Sampling)
    engine: Engine = section(Engine)

    def check(self) -> Iterator[Problem]:
        if "" in self.sampling.stop:
            yield Problem("sampling.stop", "holds an empty text", value=self.sampling.stop)
        if self.max_samples > self.engine.max_batch + self.queue:
            reason = f"is over engine.max_batch + queue = {self.engine.max_batch + self.queue}: none could be accepted"
            yield Problem("max_samples", reason, value=self.max_samples)

    def check_model(self, model: Model) -> Iterator[Problem]:
        yield from self.engine.check_model(model)
