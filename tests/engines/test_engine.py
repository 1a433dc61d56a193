"""Behavior that all engines share, on an engine that counts."""

from __future__ import annotations

import asyncio
import warnings
from dataclasses import replace
from typing import Any

import pytest

import phalanx as px
from phalanx.engines import Completion, SamplingParams
from tests.engines.counting import CONTEXT, CountingEngine


async def until(engine: CountingEngine, tokens: int) -> None:
    """Let the engine continue until an answer has ``tokens`` tokens."""
    while not any(len(answer.tokens) >= tokens for answer in engine.machine.answers.values()):
        await asyncio.sleep(0)


def generated(engine: CountingEngine, *args: object, **kwargs: object) -> list[Completion]:
    return asyncio.run(engine.generate(*args, **kwargs))  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [{"max_tokens": 4}, [{"max_tokens": 4}], None])
def test_sampling_parameters_of_another_type_are_refused_with_the_expected_type(given: object) -> None:
    with pytest.raises(ValueError, match=r"expected px.engines.SamplingParams\(max_tokens="):
        generated(CountingEngine(), [[10]], given)


@pytest.mark.parametrize("given", ["a text", {"input_ids": [[10]]}])
def test_a_text_or_a_dict_in_place_of_prompts_is_refused(given: object) -> None:
    with pytest.raises(ValueError, match=r"prompts is a (str|dict); give"):
        generated(CountingEngine(), given)


@pytest.mark.parametrize(
    ("sampling", "tokens"),
    [
        (SamplingParams(max_tokens=9), (7, 8, 9)),
        (SamplingParams(max_tokens=4, ignore_eos=True), (7, 8, 9, 10)),
        (SamplingParams(stop=(8,)), (7, 8)),
        (SamplingParams(stop=((7, 8),)), (7, 8)),
    ],
)
def test_an_answer_ends_with_its_end_token_stop_token_or_stop_sequence(
    sampling: SamplingParams, tokens: tuple[int, ...]
) -> None:
    assert generated(CountingEngine(), [[6]], sampling)[0].tokens == tokens


@pytest.mark.parametrize("column", [{"ids": "ab"}, {"prefix": Completion((7,), (), "abort", ((0, 1),))}])
def test_ids_or_prefixes_that_are_not_a_list_are_refused(column: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(column))} is .*; expected a list"):
        generated(CountingEngine(), [[6], [7]], **column)


def test_the_first_stop_text_ends_an_answer_unless_it_is_in_the_prefix() -> None:
    engine = CountingEngine()
    text = replace(
        engine.machine.vocabulary, text=lambda tokens: "".join(chr(97 + token) for token in tokens)
    )
    engine.machine.vocabulary = text
    stop = SamplingParams(max_tokens=40, stop=("a", "d"))

    (cut,) = generated(engine, [[0]], SamplingParams(max_tokens=40, stop=("d", "c")))
    (answer,) = generated(engine, [[6]], stop, prefix=[[0] + [1] * 19])

    assert cut.text == "b"
    assert answer.text == "a" + "b" * 19 + "c"


def test_a_finished_prefix_is_returned() -> None:
    done = Completion((9,), (-1.0,), "stop", ((3, 1),))

    assert generated(CountingEngine(), [[20]], prefix=[done]) == [done]


@pytest.mark.parametrize(
    ("prompt", "prefix", "message"),
    [
        ([], None, "empty"),
        ([1] * CONTEXT, None, "room for only 31"),
        ([100], None, "token 100"),
        ([20], [21, 22], "longer than max_tokens=1"),
    ],
)
def test_an_invalid_prompt_or_prefix_is_an_error_of_its_row_alone(
    prompt: Any, prefix: Any, message: str
) -> None:
    sampling = SamplingParams(max_tokens=1)
    wrong, right = generated(CountingEngine(), [prompt, [20]], sampling, prefix=[prefix, None])

    assert wrong.finish_reason == "error" and message in str(wrong.error)
    assert right.tokens == (21,)


def test_answers_wait_for_capacity_of_the_engine_and_end_when_the_context_is_full() -> None:
    made = generated(CountingEngine(room=1), [[10], [20], [30]], SamplingParams(max_tokens=2))
    (full,) = generated(CountingEngine(), [[20] * (CONTEXT - 2)], SamplingParams(max_tokens=9))

    assert [one.tokens for one in made] == [(11, 12), (21, 22), (31, 32)]
    assert (len(full.tokens), full.finish_reason) == (2, "length")


@pytest.mark.parametrize("ids", [None, "mine", ["mine", "unknown"], "a pause", "a close"])
def test_an_answer_continues_after_an_abort_a_pause_or_a_close(ids: list[str] | str | None) -> None:
    alone = ids in (None, "a pause", "a close")

    async def interrupted() -> tuple[Completion, Completion, Completion]:
        engine, six = CountingEngine(room=1 if alone else None), SamplingParams(max_tokens=6)
        call = asyncio.create_task(engine.generate([[20], [30]], six, ids=["mine", "other"]))
        await until(engine, 2)
        if ids == "a pause":
            await engine.pause("abort")
            await engine.resume()
        elif ids == "a close":
            engine.close()
            engine = CountingEngine()
        else:
            assert await engine.abort(ids) == (2 if ids is None else 1)
        part, other = await call
        (whole,) = await engine.generate([[20]], SamplingParams(max_tokens=6), prefix=[part])
        return part, other, whole

    part, other, whole = asyncio.run(interrupted())

    assert part.finish_reason == "abort" and not part.finished and 2 <= len(part.tokens) < 6
    assert other.tokens == (() if alone else (31, 32, 33, 34, 35, 36))
    assert whole.tokens == (21, 22, 23, 24, 25, 26) and len(whole.log_probs) == 6


def test_a_pause_with_keep_stops_between_two_steps() -> None:
    async def paused() -> tuple[int, int, tuple[int, ...]]:
        engine = CountingEngine()
        call = asyncio.create_task(engine.generate([[20]], SamplingParams(max_tokens=6)))
        await until(engine, 2)
        await engine.pause("keep")
        (answer,) = engine.machine.answers.values()
        before = len(answer.tokens)
        for _ in range(10):
            await asyncio.sleep(0)
        after = len(answer.tokens)
        await engine.resume()
        return before, after, (await call)[0].tokens

    before, after, tokens = asyncio.run(paused())

    assert before == after == 2
    assert tokens == (21, 22, 23, 24, 25, 26)


def test_a_pause_with_wait_returns_after_running_answers_and_starts_no_others() -> None:
    async def paused() -> tuple[bool, bool]:
        engine = CountingEngine()
        running = asyncio.create_task(engine.generate([[20]], SamplingParams(max_tokens=6)))
        await until(engine, 1)
        pause = asyncio.create_task(engine.pause("wait"))
        await asyncio.sleep(0)
        late = asyncio.create_task(engine.generate([[20]], SamplingParams(max_tokens=1)))
        await pause
        await asyncio.sleep(0)
        found = running.done(), late.done()
        await engine.resume()
        await late
        return found

    assert asyncio.run(paused()) == (True, False)


@pytest.mark.parametrize("fails", ["step", "remove"])
def test_an_error_of_the_runner_fails_all_running_calls_but_no_later_call(
    monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    def broken(*_: object) -> None:
        raise ArithmeticError("the kernel is broken")

    async def made() -> list[object]:
        calls = [engine.generate([[20]], SamplingParams(max_tokens=count)) for count in (1, 9)]
        return await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 10)

    engine = CountingEngine()
    with monkeypatch.context() as patch:
        patch.setattr(engine.machine, fails, broken)
        errors = asyncio.run(made())
        engine.machine.answers.clear()

    assert [str(error) for error in errors] == ["the kernel is broken"] * 2
    assert generated(engine, [[20]], SamplingParams(max_tokens=1))[0].tokens == (21,)


def test_a_cancelled_call_leaves_no_answer_in_the_engine() -> None:
    async def cancelled() -> int:
        engine = CountingEngine()
        call = asyncio.create_task(engine.generate([[20]], SamplingParams(max_tokens=9, ignore_eos=True)))
        await until(engine, 1)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        return len(engine.machine.answers)

    assert asyncio.run(cancelled()) == 0


def test_unsupported_sleep_warns_once_and_the_engine_still_generates() -> None:
    engine = CountingEngine()
    with pytest.warns(UserWarning, match="does nothing"):
        asyncio.run(engine.sleep())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asyncio.run(engine.sleep())

    assert generated(engine, [[20]], SamplingParams(max_tokens=1))[0].tokens == (21,)


def test_each_row_of_sampling_parameters_has_its_own_seed_and_stop_none_is_empty() -> None:
    assert [one.seed for one in SamplingParams(seed=5).each(3)] == [5, 6, 7]
    assert SamplingParams(stop=None).stop == ()  # type: ignore[arg-type]


SLOW_ON_RAY = True


def test_a_call_of_a_paused_engine_waits_for_resume_and_raises_inline(
    pool: px.ResourcePool, backend: str
) -> None:
    group = px.WorkerGroup(pool[0:1], CountingEngine)
    group.pause("keep")
    if backend == "inline":
        with pytest.raises(RuntimeError, match="resume"):
            group.generate([[10]])
        group.resume()
    else:
        call = group.generate.submit([[10]], SamplingParams(max_tokens=1))
        group.resume()
        assert call.result()[0].tokens == (11,)
    group.close()


def test_a_restored_engine_repeats_the_seeds_of_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, seeds = CountingEngine(), []
    add = engine.machine.add
    monkeypatch.setattr(
        engine.machine, "add", lambda answers: (seeds.extend(a.seed for a in answers), add(answers))
    )
    state = engine.state_dict()
    generated(engine, [[10], [20]], SamplingParams(max_tokens=1))
    engine.load_state_dict(state)
    generated(engine, [[10], [20]], SamplingParams(max_tokens=1))

    assert seeds[:2] == seeds[2:]
    assert seeds[0] != seeds[1]


def test_a_trace_has_counters_of_each_engine(pool: px.ResourcePool) -> None:
    with px.trace() as trace:
        group = px.WorkerGroup(pool, CountingEngine)
        group.generate([[10], [20], [30], [40]], SamplingParams(max_tokens=3))
    found = {counter.name: counter for counter in trace.events.counters}

    assert sorted(found) == [f"engine of {group.name} rank {rank}" for rank in range(group.world_size)]
    assert sum(counter.values["tokens"][-1] for counter in found.values()) == 12


def test_an_engine_reports_a_line_and_metrics() -> None:
    lines, numbers = list[str](), dict[str, dict[str, float]]()

    async def run() -> None:
        engine = CountingEngine()
        engine._context.tell = lines.append
        engine._context.measure = lambda what, rank, values: numbers.update({f"{what} {rank}": dict(values)})
        await engine.generate([[10], [20]], SamplingParams(max_tokens=3))

    asyncio.run(run())

    ((name, values),) = numbers.items()
    assert name.startswith("engine ")
    assert (values["tokens"], values["running"]) == (6.0, 0.0)
    assert lines[-1].endswith("0 running, 0 waiting, cache 0%, 2 rows done")
