"""Schema of what observes a run: statistics of layers and machine, alerts, watchdog and profiles."""

from collections.abc import Iterator

from maxhydra.config.declare import Schema, option, schema
from maxhydra.config.errors import Problem, did_you_mean

# Events that end a session, and all events of alerts.
END_EVENTS = ("finished", "failed", "preempted")
EVENTS = ("nan", "spike", "stall", *END_EVENTS)


@schema
class Statistics(Schema):
    """Statistics of every layer in statistics.jsonl, and of the machine in metrics.jsonl; both are in the report.

    Steps that record layers run a second compiled program; all other steps run the same program as without.
    `maxhydra runs statistics` shows a record.
    """

    every: int | None = option(None, ge=1)
    """Steps between records. null: none."""
    system_seconds: float | None = option(10.0, gt=0)
    """Seconds between samples of memory, CPU, network, GPU utilization and power, which are logged as metrics
    `system/*` of the next logged step. null: none."""


@schema
class Alerts(Schema):
    """A command or a webhook that is called when something happens to the run. Process 0 sends, in the background."""

    command: str | None = None
    """Shell command, with the alert as JSON on stdin and in MAXHYDRA_ALERT_EVENT, _TEXT, _RUN and _PATH. null: none."""
    webhook: str | None = None
    """URL that the alert is posted to as JSON; Slack and Mattermost show its field `text`. Pass it as
    '${oc.env:NAME}': URLs of webhooks are secrets, and are not stored. null: none."""
    events: list[str] = option(list(EVENTS))
    """nan: loss or gradient of a logged step is not finite. spike: the loss of a logged step is above median +
    spike_factor * MAD. stall: the watchdog reports a hung step. finished, failed, preempted: the session ends so."""
    spike_window: int = option(100, ge=3)
    """Logged steps of this session whose losses a spike is compared with; there are none among the first ten."""
    spike_factor: float = option(10.0, gt=0)
    """Median absolute deviations above the median that make a spike."""
    min_seconds: float = option(300.0, ge=0)
    """Least time between two alerts about nan, spike or stall each."""
    timeout: float = option(10.0, gt=0)
    """Seconds that the command, one request to the webhook, and delivery at the end of the run may take."""

    def check(self) -> Iterator[Problem]:
        for event in self.events:
            if event not in EVENTS:
                hint = did_you_mean(event, EVENTS)
                yield Problem("events", "contains an unknown event", event, accepted=", ".join(EVENTS), hint=hint)
        if self.webhook is not None and not self.webhook.startswith(("http://", "https://")):
            yield Problem("webhook", "is not a URL", accepted="http://... or https://...")


@schema
class Watchdog(Schema):
    """Reports training steps that hang, and ends the run if they do not complete."""

    factor: float | None = option(10.0, gt=1)
    """A step that takes this many times the median of recent steps hangs: the Python stacks of all threads and
    processes are written to log.txt and stacks-PROCESS.txt in the run folder. null: no watchdog."""
    min_seconds: float = option(60.0, gt=0)
    """Time that every step may take. Evaluations, saves and compilations do not count."""
    first_seconds: float = option(600.0, gt=0)
    """Time that each of the first steps of a session may take, before a median is known."""
    end_seconds: float | None = option(600.0, gt=0)
    """The run ends with exit code 75, which restarts it on SLURM and GKE, if the step has not completed this long after
    the stacks were written. null: it never ends."""


@schema
class Profile(Schema):
    """Profiles of training steps (jax.profiler) in the folder `profile` of the run; see `maxhydra runs profile`.

    SIGUSR2 profiles the next steps of the process that receives it. With task=decode and serve, a step is an iteration
    of the engine, and the folder is in run.outputs/run.name. On a GPU, profiled training steps of a single process run
    a program without command buffers, so that kernels can be attributed to operations; it is compiled for the first
    profile.
    """

    steps: list[int] = option([])
    """First and last step of a profile, such as [10,15]. Empty: none."""
    every: int | None = option(None, ge=1)
    """Start a profile at each multiple of this number of steps. null: none."""
    length: int = option(5, ge=1)
    """Steps in a profile of profile.every and of SIGUSR2."""
    memory: bool = False
    """Also write the live arrays of device memory after each profile, to memory.prof (for pprof)."""
    processes: list[int] = option([0])
    """Processes that profile their devices; the folders of others than 0 end with the number of the process."""

    def check(self) -> Iterator[Problem]:
        first, last = self.steps if len(self.steps) == 2 else (0, 0)
        if self.steps and not 1 <= first <= last:
            yield Problem("steps", "is not a range of steps", self.steps, accepted="[FIRST,LAST], from step 1, or []")
        if self.every is not None and self.length >= self.every:
            accepted = f"1 to {self.every - 1}" if self.every > 1 else "no value, with profile.every=1"
            yield Problem("length", f"is not less than profile.every={self.every}", self.length, accepted=accepted)
        if any(process < 0 for process in self.processes):
            yield Problem("processes", "contains a negative number", self.processes, accepted="indices from 0")
