"""What an engine has under way, step after step: which calls wait for which rows, and who hears of their ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence

from phalanx.engines.calls import EngineCall
from phalanx.engines.engine_requests import Answer, Gate, Requests, Row
from phalanx.engines.engine_types import EngineStatistics, PauseMode
from phalanx.engines.meter import Meter
from phalanx.engines.model_runner import ModelRunner

__all__ = ["EngineLoop"]


class EngineLoop:
    """Of one engine; all of it happens on the loop of its rank.

    Args:
        machine: draws the tokens.
        requests: of it.
        version: gives that of the weights.
        check: raises where no token may be drawn.
        meter: counts.
        tell: is called now and then while there are steps, and ``rests`` when there are none any more.
    """

    def __init__(
        self,
        machine: ModelRunner,
        requests: Requests,
        *,
        version: Callable[[], int],
        check: Callable[[], None],
        meter: Meter,
        tell: Callable[[], None],
        rests: Callable[[], None],
    ) -> None:
        self.gate = Gate()
        self._machine, self._requests, self._meter = machine, requests, meter
        self._version, self._check, self._tell, self._rests = version, check, tell, rests
        self._calls: dict[Row, EngineCall] = {}
        self._stepping: asyncio.Task[None] | None = None
        self._idle: list[asyncio.Future[None]] = []
        self._had = 0

    def begin(self, rows: Sequence[Row], *, tokens: bool) -> EngineCall:
        """A call for these rows, of which those that need steps wait for them from now on."""
        call = EngineCall(rows, tokens=tokens, leave=self._leave)
        for row in rows:
            if row.over:
                self._told(row, call)
            else:
                self._calls[row] = call
                self._requests.put(row)
        self.go_on()
        return call

    def abort(self, wanted: Callable[[Answer], bool]) -> int:
        """End answers where they are; of how many rows."""
        ended = self._requests.abort(wanted)
        if ended:
            self._machine.remove(ended)
        rows = {answer.row: None for answer in ended}
        self._settle_rows(rows)
        return len(rows)

    async def until_idle(self) -> None:
        """Return once no answer is running."""
        if self._requests.running:
            self.go_on()
            idle = asyncio.get_running_loop().create_future()
            self._idle.append(idle)
            await idle

    def statistics(self) -> EngineStatistics:
        """What it does now, and did."""
        paused: PauseMode | None = self.gate.mode
        return self._meter.statistics(
            running=len(self._requests.running),
            waiting=len(self._requests.waiting),
            cache_use=self._machine.cache_use(),
            version=self._version(),
            paused=paused,
        )

    def go_on(self) -> None:
        """See to it that steps are taken, if there are any to take."""
        if self._stepping is None and self.gate.steps(self._requests):
            self._stepping = asyncio.get_running_loop().create_task(self._steps())

    async def _steps(self) -> None:
        """Step after step. Between two of them everything else of this rank has its turn: calls, and syncs of
        weights.
        """
        self._meter.begins()
        try:
            while self.gate.steps(self._requests):
                await self._step()
                await asyncio.sleep(0)
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, Exception):
                raise
        finally:
            self._stepping = None
            self._rests()

    async def _step(self) -> None:
        self._check()
        version = self._version()
        if version != self._had:
            self._machine.weights_changed()
            self._had = version
        if self.gate.open:
            begun = self._requests.admit(self._machine.room())
            if begun:
                self._machine.add(begun)
        stepped = self._machine.step()
        drawn = list(await stepped if isinstance(stepped, Awaitable) else stepped)
        self._meter.drew(len(drawn))
        if self._meter.due():
            self._tell()
        changed = list(self._requests.take(drawn, version))
        for answer in changed:
            self._calls[answer.row].drew(answer)
        over = [answer for answer in changed if answer.finish_reason is not None]
        if over:
            self._machine.remove(over)
            self._settle_rows({answer.row: None for answer in over})

    def _told(self, row: Row, call: EngineCall) -> None:
        """Its call hears that a row is at its end."""
        self._meter.ended(row)
        call.ended(row, self._version())

    def _leave(self, rows: Iterable[Row]) -> None:
        """Nobody waits for these rows any more."""
        left = [row for row in rows if self._calls.pop(row, None) is not None]
        dropped = self._requests.drop(answer for row in left for answer in row.answers)
        if dropped:
            self._machine.remove(dropped)
        self._settle()

    def _settle_rows(self, rows: Iterable[Row]) -> None:
        for row in rows:
            if row.over and (call := self._calls.pop(row, None)) is not None:
                self._told(row, call)
        self._settle()

    def _settle(self) -> None:
        """Those who wait for the running answers hear that there are none."""
        if not self._requests.running:
            for idle in self._idle:
                if not idle.done():
                    idle.set_result(None)
            self._idle.clear()

    def _fail(self, error: BaseException) -> None:
        """All calls under way end with ``error``; the engine is empty then."""
        dropped = self._requests.drop([*self._requests.running.values(), *self._requests.waiting.values()])
        calls = {id(call): call for call in self._calls.values()}
        self._calls.clear()
        for call in calls.values():
            call.failed(error)
        self._machine.remove(dropped)
        self._settle()
