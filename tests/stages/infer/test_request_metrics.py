"""What a worker measures of a request: each once, whoever continues it."""

from __future__ import annotations

import itertools

from memory_pipeline import Pipeline, validated

from penstock.config import metrics
from penstock.engine import CacheStats, EngineStats
from penstock.engine.output import SpeculationStats, SpillStats
from penstock.schemas.events import Delta
from penstock.schemas.jobs import ValidatedJob
from penstock.stages.infer.request_metrics import EngineMetrics, RequestMetrics, WorkerMetrics

_names = (f"m{number}" for number in itertools.count())


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def counted(name: str, worker: str) -> float:
    return metrics.REGISTRY.get_sample_value(name, {"model_name": "echo", "engine": worker}) or 0.0


def inter_token(worker: str) -> list[float]:
    """The sum of what was observed, with how often if more than once."""
    total, times = (counted(f"vllm:inter_token_latency_seconds_{part}", worker) for part in ("sum", "count"))
    return [total] if times == 1 else [total, times]


def delta(index: int, count: int, *, end: bool = False) -> Delta:
    return Delta("r", 1, 0, index, tuple(range(count)), "x", finish_reason="length" if end else None)


def job_of(pipeline: Pipeline) -> ValidatedJob:
    return validated("measured", pipeline.pipe).model_copy(update={"created": 100.0})


def test_the_phases_of_a_request_add_up(pipeline: Pipeline) -> None:
    clock, worker = Clock(), next(_names)
    clock.now = 101.0
    measured = RequestMetrics(job_of(pipeline), WorkerMetrics("echo", worker), clock)
    measured.began()
    clock.now = 103.0
    measured.published([delta(0, 1)], {0: (2.5, 2.5)})
    clock.now = 107.0
    measured.published([delta(1, 8, end=True)], {0: (2.5, 6.5)})
    measured.ended()
    assert counted("vllm:request_queue_time_seconds_sum", worker) == 1.0
    assert counted("vllm:request_prefill_time_seconds_sum", worker) == 2.0
    assert counted("vllm:time_to_first_token_seconds_sum", worker) == 3.0
    assert counted("vllm:request_decode_time_seconds_sum", worker) == 4.0
    assert counted("vllm:request_inference_time_seconds_sum", worker) == 6.0
    assert counted("vllm:e2e_request_latency_seconds_sum", worker) == 7.0
    assert counted("vllm:request_time_per_output_token_seconds_sum", worker) == 0.5
    assert counted("vllm:generation_tokens_total", worker) == 9
    assert counted("vllm:request_generation_tokens_sum", worker) == 9
    assert inter_token(worker) == [0.5]


def test_tokens_that_travel_together_have_their_times_all_the_same(pipeline: Pipeline) -> None:
    clock, worker = Clock(), next(_names)
    clock.now = 101.0
    measured = RequestMetrics(job_of(pipeline), WorkerMetrics("echo", worker), clock)
    measured.began()
    measured.published([delta(0, 9, end=True)], {0: (2.0, 6.0)})
    measured.ended()
    assert counted("vllm:request_decode_time_seconds_sum", worker) == 4.0
    assert inter_token(worker) == [0.5]


def test_a_request_decodes_from_the_first_token_of_any_choice_to_the_last_of_all(pipeline: Pipeline) -> None:
    worker = next(_names)
    measured = RequestMetrics(job_of(pipeline), WorkerMetrics("echo", worker), Clock())
    both = [delta(0, 3, end=True), Delta("r", 1, 1, 0, (7, 8, 9), "x", finish_reason="stop")]
    measured.published(both, {0: (3.0, 5.0), 1: (2.0, 8.0)})
    measured.ended()
    assert counted("vllm:request_decode_time_seconds_sum", worker) == 6.0
    assert inter_token(worker) == [4.0, 2]


def test_of_a_takeover_each_worker_counts_its_own_tokens_and_one_the_whole(pipeline: Pipeline) -> None:
    clock, first, second = Clock(), next(_names), next(_names)
    job = job_of(pipeline)
    clock.now = 101.0
    began = RequestMetrics(job, WorkerMetrics("echo", first), clock)
    began.began()
    began.published([delta(0, 3)], {0: (1.0, 1.0)})
    clock.now = 110.0
    continued = RequestMetrics(job, WorkerMetrics("echo", second), clock)
    continued.continued([[1, 2, 3]])
    clock.now = 112.0
    continued.published([delta(3, 2, end=True)], {0: (1.0, 1.0)})
    continued.ended()
    for name, of_first, of_second in (
        ("vllm:generation_tokens_total", 3, 2),
        ("vllm:prompt_tokens_total", job.prompt_tokens, 0),
        ("vllm:time_to_first_token_seconds_count", 1, 0),
        ("vllm:e2e_request_latency_seconds_sum", 0, 12),
        ("vllm:request_generation_tokens_sum", 0, 5),
        ("penstock_takeovers_total", 0, 1),
    ):
        assert (counted(name, first), counted(name, second)) == (of_first, of_second), name


def test_who_continues_before_the_first_token_measures_it(pipeline: Pipeline) -> None:
    clock, worker = Clock(), next(_names)
    clock.now = 150.0
    continued = RequestMetrics(job_of(pipeline), WorkerMetrics("echo", worker), clock)
    continued.continued([[]])
    continued.published([delta(0, 1, end=True)], {0: (1.0, 1.0)})
    assert counted("vllm:time_to_first_token_seconds_sum", worker) == 50.0


def test_the_engine_s_state_is_that_of_the_moment() -> None:
    parts = SpeculationStats(3, 9, 7), SpillStats(4096, 47, 53, 59, 61)
    stats = EngineStats(2, 3, 5, 7, 11, 13, CacheStats(17, 19, 0.5, 23, 29, 31, 37, 41, 43, *parts))
    found = {
        sample.name: sample.value
        for family in EngineMetrics(lambda: stats, "m", "w").collect()
        for sample in family.samples
    }
    assert found["vllm:num_requests_running"] == 2
    assert found["vllm:num_requests_waiting"] == 3
    assert found["vllm:kv_cache_usage_perc"] == 0.5
    assert found["vllm:prefix_cache_queries_total"] == 31
    assert found["vllm:prefix_cache_hits_total"] == 37
    assert found["vllm:num_preemptions_total"] == 43
    assert found["vllm:spec_decode_num_drafts_total"] == 3
    assert found["vllm:spec_decode_num_draft_tokens_total"] == 9
    assert found["vllm:spec_decode_num_accepted_tokens_total"] == 7
    names = "written", "found", "dropped", "damaged"
    assert [found[f"penstock_prefix_disk_{name}_blocks_total"] for name in names] == [47, 53, 59, 61]
    assert found["penstock_prefix_disk_bytes"] == 4096
    assert found["penstock_engine_steps_total"] == 13


def test_only_what_is_over_counts_as_ended_and_once(pipeline: Pipeline) -> None:
    def ended(outcome: str) -> float:
        return metrics.REGISTRY.get_sample_value("penstock_requests_total", {"outcome": outcome}) or 0.0

    before = ended("completed"), ended("refused")
    body = {"model": "echo", "prompt": "count", "max_tokens": 3}
    pipeline.runner.run(pipeline.events(body))
    pipeline.runner.run(pipeline.events(body | {"max_tokens": -3}))
    assert (ended("completed"), ended("refused")) == (before[0] + 1, before[1] + 1)
