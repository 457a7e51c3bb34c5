"""Random add/step/abort programs on the native scheduler, over tiny pools and budgets and both policies.

A stand-in for the model writes every scheduled token into a KV cache (a dict of slots) through the block table, reads
the whole context back, and makes the next token out of it. So a block that is lost, shared or freed too early, and an
output lost in a preemption, show as wrong tokens: every sequence must give what it gives alone. After each operation
the scheduler checks its own integrity. Over all programs, the events met are counted, printed and held against
minimums.
"""

import zlib
from array import array
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from steploop._C import Scheduler
from steploop.errors import InvalidRequestError

NUM_PROGRAMS = 3000
EOS = 1
STOP = 2

# Each must be met at least this often over the run.
MINIMUMS = {
    "sequences": 5000,
    "refused": 300,
    "preemptions": 300,
    "chunked prompts": 1000,
    "full pools": 1000,
    "aborts while waiting": 300,
    "aborts while running": 150,
    "aborts while preempted": 10,
    "aborts in flight": 150,
    "unknown aborts": 300,
    "failed samples": 100,
    "ends by stop": 300,
    "ends by length": 1000,
    "steps with a full budget": 1000,
}


def next_token(context):
    return zlib.crc32(array("i", context)) % 40


def run_alone(prompt, max_tokens, stops):
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens:
        tokens.append(next_token(tokens))
        if tokens[-1] in stops:
            break
    return tokens[len(prompt) :]


class Program:
    """One scheduler under random operations, beside what a user of it must see."""

    def __init__(self, counts, **config):
        self.scheduler = Scheduler(**config)
        self.config = config
        self.counts = counts
        self.kv = {}
        self.expected = {}  # unfinished sequence -> its output tokens when alone
        self.prompts = {}
        self.outputs = {}
        self.chunked = set()
        self.num_added = 0
        self.num_steps = 0
        self.max_num_steps = 0  # the oldest unfinished sequence advances in every step

    def add(self, num_prompt_tokens, max_tokens, stops):
        sequence_id = self.num_added
        self.num_added += 1
        prompt = [(sequence_id * 7 + i) % 40 for i in range(num_prompt_tokens)]
        options = {"eos_token_ids": [EOS], "stop_token_ids": [STOP]} if stops else {}
        try:
            self.scheduler.add(sequence_id, prompt, max_tokens=max_tokens, **options)
        except InvalidRequestError:
            self.counts["refused"] += 1
            longest = num_prompt_tokens + min(max_tokens, self.config["max_model_len"] - num_prompt_tokens) - 1
            num_slots = self.config["num_kv_blocks"] * self.config["block_size"]
            assert num_prompt_tokens == 0 or num_prompt_tokens >= self.config["max_model_len"] or longest > num_slots
            return
        self.counts["sequences"] += 1
        max_tokens = self.scheduler.sequence_info(sequence_id)["max_tokens"]
        self.prompts[sequence_id] = prompt
        self.outputs[sequence_id] = []
        self.expected[sequence_id] = run_alone(prompt, max_tokens, {EOS, STOP} if stops else set())
        self.max_num_steps += num_prompt_tokens + max_tokens - 1

    def abort(self, which):
        if not self.num_added:
            return
        sequence_id = self.num_added - 1 - which % self.num_added
        if sequence_id in self.expected:
            info = self.scheduler.sequence_info(sequence_id)
            self.counts["aborts in flight" if info["in_flight"] else f"aborts while {info['state']}"] += 1
            assert self.scheduler.abort(sequence_id)
            assert self.scheduler.state(sequence_id) == "finished"
            del self.expected[sequence_id]
        else:
            self.counts["unknown aborts"] += 1
        assert not self.scheduler.abort(sequence_id)

    def abort_preempted(self):
        preempted = [i for i in self.expected if self.scheduler.state(i) == "preempted"]
        if preempted:
            self.abort(self.num_added - 1 - preempted[-1])

    def step(self, abort_in_flight=None, fails=False):
        output = self.scheduler.schedule()
        self.scheduler.check_integrity()
        self.check_output(output)
        samples = []
        for scheduled in output.scheduled:
            token = self.run_model(scheduled)
            if scheduled.num_sample_rows:
                samples.append((scheduled.sequence_id, token))
        if fails and samples:
            samples[-1] = (samples[-1][0], None)
        if abort_in_flight is not None:
            self.abort(abort_in_flight)
            self.scheduler.check_integrity()
        running = set(self.expected)
        ended = {id_: (reason, tokens) for id_, reason, tokens in self.scheduler.update(output.step_id, samples)}
        for sequence_id, token in samples:
            if sequence_id in running:
                self.take_sample(sequence_id, token, ended.pop(sequence_id, None))
        assert not ended

    def check_output(self, output):
        stats = self.scheduler.stats()
        assert bool(output.scheduled) == self.scheduler.has_unfinished()
        assert output.num_scheduled_tokens == sum(s.num_scheduled_tokens for s in output.scheduled)
        assert output.num_scheduled_tokens == output.num_prompt_tokens + output.num_decode_tokens
        assert output.num_scheduled_tokens <= self.config["max_num_batched_tokens"]
        assert stats["num_running"] <= self.config["max_num_seqs"]
        if output.scheduled:
            assert output.scheduled[0].sequence_id == min(self.expected), "the oldest must advance"
            self.num_steps += 1
        if self.config["policy"] == "on_demand":
            assert len(output.scheduled) == stats["num_running"], "every running sequence must advance"
        else:
            assert not output.preempted
        self.counts["preemptions"] += len(output.preempted)
        self.counts["full pools"] += stats["num_used_kv_blocks"] == stats["num_kv_blocks"]
        self.counts["steps with a full budget"] += output.num_scheduled_tokens == self.config["max_num_batched_tokens"]

    def run_model(self, scheduled):
        table = self.scheduler.block_table(scheduled.sequence_id)
        tokens = self.prompts[scheduled.sequence_id] + self.outputs[scheduled.sequence_id]
        block_size = self.config["block_size"]
        end = scheduled.first_token + scheduled.num_scheduled_tokens
        assert scheduled.num_scheduled_tokens >= 1
        assert scheduled.num_sample_rows == (end == len(tokens))
        for position in range(scheduled.first_token, end):
            self.kv[table[position // block_size], position % block_size] = tokens[position]
        if not scheduled.num_sample_rows:
            if scheduled.sequence_id not in self.chunked:
                self.counts["chunked prompts"] += 1
            self.chunked.add(scheduled.sequence_id)
            return None
        return next_token([self.kv[table[i // block_size], i % block_size] for i in range(end)])

    def take_sample(self, sequence_id, token, end):
        expected = self.expected[sequence_id]
        output = self.outputs[sequence_id]
        if token is None:
            self.counts["failed samples"] += 1
            assert end == ("error", output)
        else:
            output.append(token)
            assert output == expected[: len(output)], "other tokens than alone"
            if len(output) < len(expected):
                assert end is None
                return
            reason, tokens = end
            self.counts[f"ends by {reason}"] += 1
            assert tokens == expected
        del self.expected[sequence_id]

    def finish(self):
        while self.scheduler.has_unfinished():
            self.step()
            assert self.num_steps <= self.max_num_steps, "starved"
        assert not self.expected
        self.scheduler.check_integrity()
        stats = self.scheduler.stats()
        assert (
            stats["num_used_kv_blocks"] == stats["num_kv_tokens"] == stats["num_waiting"] == stats["num_running"] == 0
        )
        assert stats["num_finished"] == len(self.prompts)
        assert stats["num_steps"] == self.num_steps


configs = st.fixed_dictionaries(
    {
        "max_num_seqs": st.sampled_from([1, 2, 3, 4, 6, 6]),
        "max_num_batched_tokens": st.one_of(st.integers(1, 8), st.integers(6, 64)),
        "max_model_len": st.integers(16, 100),
        "num_kv_blocks": st.integers(3, 10),
        "block_size": st.just(8),
        "policy": st.sampled_from(["on_demand", "on_demand", "static"]),
    }
)
# Mostly short prompts with long outputs: what makes blocks run out among running sequences.
adds = st.tuples(
    st.just("add"),
    st.one_of(st.integers(1, 6), st.integers(1, 6), st.integers(0, 60)),
    st.one_of(st.integers(8, 40), st.integers(16, 40), st.integers(1, 80)),
    st.sampled_from([False, False, True]),
)
steps = st.tuples(st.just("step"), st.integers(1, 24))
special_steps = st.tuples(st.just("special_step"), st.one_of(st.none(), st.integers(0, 7)), st.booleans())
aborts = st.one_of(st.tuples(st.just("abort"), st.integers(0, 7)), st.just(("abort_preempted",)))
shuffles = st.tuples(st.just("shuffle"), st.integers(0, 99))
programs = st.tuples(
    st.lists(adds, min_size=2, max_size=6),
    st.lists(st.one_of(adds, steps, steps, special_steps, aborts, shuffles), min_size=2, max_size=20),
)


@pytest.fixture(scope="module")
def counts(report):
    counts = Counter()
    yield counts
    width = max(map(len, MINIMUMS))
    report("met by the random scheduler programs:")
    for name, minimum in MINIMUMS.items():
        report(f"  {name:<{width}} {counts[name]:>8}  (at least {minimum})")


@settings(
    max_examples=NUM_PROGRAMS,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(config=configs, program=programs)
def test_random_programs(counts, config, program):
    first_adds, operations = program
    run = Program(counts, **config)
    for operation, *arguments in [*first_adds, *operations]:
        if operation == "add":
            run.add(*arguments)
        elif operation == "step":
            for _ in range(arguments[0]):
                run.step()
                run.scheduler.check_integrity()
        elif operation == "special_step":
            run.step(abort_in_flight=arguments[0], fails=arguments[1])
        elif operation == "abort":
            run.abort(*arguments)
        elif operation == "abort_preempted":
            run.abort_preempted()
        else:
            run.scheduler.shuffle_free_blocks(*arguments)
        run.scheduler.check_integrity()
    run.finish()


def test_the_random_programs_met_what_they_should(counts):
    if not counts:
        pytest.skip("counts what test_random_programs met in the same run")
    missed = {name: (counts[name], minimum) for name, minimum in MINIMUMS.items() if counts[name] < minimum}
    assert not missed, "met too rarely (count, minimum)"
