"""A mixture: rows of several sources, each in its share, in an order that depends on nothing but the shares."""

from collections.abc import Mapping

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema.data import Data
from maxhydra.data.rows import Row
from maxhydra.data.stream import ReadStats, State, Stream


def shares(data: Data, sizes: Mapping[str, int | None]) -> dict[str, float]:
    """Each source's share of the rows: its weight, or its number of records to the power 1 / temperature."""
    if data.weights:
        raw = {name: float(data.weights[name]) for name in data.sources}
    else:
        for name, size in sizes.items():
            if size is None:
                reason = f"are needed, since the length of data.sources.{name} is not known"
                hint = "a stream has no length for data.temperature to go by"
                raise ConfigError(Problem("data.weights", reason, accepted="a weight for each source", hint=hint))
        raw = {name: float(size or 0) ** (1 / data.temperature) for name, size in sizes.items()}
    total = sum(raw.values())
    return {name: value / total for name, value in raw.items()}


class MixtureStream:
    """Takes the next row from the source that is furthest behind its share, the first of them on a tie."""

    def __init__(self, streams: Mapping[str, Stream], shares: Mapping[str, float]):
        self._streams, self._shares = dict(streams), shares
        self._given = dict.fromkeys(streams, 0)

    @property
    def counts(self) -> ReadStats:
        return sum((stream.counts for stream in self._streams.values()), ReadStats())

    def _next(self) -> Stream:
        given = sum(self._given.values()) + 1
        name = max(self._shares, key=lambda name: self._shares[name] * given - self._given[name])
        self._given[name] += 1
        return self._streams[name]

    def take(self) -> Row:
        return self._next().take()

    def skip(self) -> None:
        self._next().skip()

    def state(self) -> State:
        return {
            "given": dict(self._given),
            "shares": dict(self._shares),
            "sources": {name: stream.state() for name, stream in self._streams.items()},
        }

    def restore(self, state: State) -> None:
        """Each source goes on, and one that was not there begins.

        With other shares, rows are counted anew: those that the old ones gave out would else be made up for.
        """
        is_same = state.get("shares", self._shares) == self._shares
        for name, stream in self._streams.items():
            self._given[name] = int(state["given"][name]) if is_same else 0
            if is_same or name in state["sources"]:
                stream.restore(state["sources"][name])

    def close(self) -> None:
        for stream in self._streams.values():
            stream.close()
