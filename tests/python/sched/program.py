"""A scheduler under random operations, beside what a user of it must see.

A stand-in for the model keeps a KV cache (a dict of slots): what it writes for a token depends on all tokens before it,
as real keys and values do. Transfers are done in order, then all tokens of the step are written, then each sequence's
whole context is read back through its block table and its next token made of that. So a block that is lost, shared
without right, freed too early or copied too late shows as wrong KV or wrong tokens: every sequence must give what it
gives alone.
"""

import zlib
from array import array
from collections import Counter

from steploop._C import Scheduler, SchedulerConfig
from steploop.errors import InvalidRequestError

EOS = 1
STOP = 2
VOCAB_SIZE = 40


def next_token(context, sample_index):
    return zlib.crc32(array("i", [*context, sample_index])) % VOCAB_SIZE


def run_alone(prompt, max_tokens, stops, sample_index):
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens:
        tokens.append(next_token(tokens, sample_index))
        if tokens[-1] in stops:
            break
    return tokens[len(prompt) :]


def key_values(tokens, cache_key):
    """What the cache must hold for each of `tokens`."""
    values, state = [], cache_key + 17
    for token in tokens:
        state = (state * 1_000_003 + token + 7) % (1 << 61)
        values.append(state)
    return values


class Program:
    def __init__(self, counts: Counter, **config):
        self.scheduler = Scheduler(SchedulerConfig(**config))
        self.config = config
        self.counts = counts
        self.kv = {}  # (pool, block, offset) -> what it holds
        self.expected = {}  # unfinished sequence -> its output tokens when alone
        self.prompts = {}
        self.outputs = {}
        self.options = {}  # sequence -> its priority, cache_key, deadline_us, sample_index
        self.num_steps = 0
        self.num_idle_steps = 0
        self.now_us = 1
        self.oldest, self.num_passed = None, 0

    # ---- Operations ----

    def add(self, prompt, max_tokens, stops, num_samples=1, priority=0, tenant="", cache_key=0, deadline=None):
        options = {"eos_token_ids": [EOS], "stop_token_ids": [STOP]} if stops else {}
        deadline_us = None if deadline is None else self.now_us + deadline
        first = len(self.prompts)
        try:
            self.scheduler.add(
                first,
                prompt,
                max_tokens=max_tokens,
                now_us=self.now_us,
                priority=priority,
                tenant=tenant,
                cache_key=cache_key,
                deadline_us=deadline_us,
                **options,
            )
        except InvalidRequestError:
            self.counts["refused"] += 1
            longest = len(prompt) + min(max_tokens, self.config["max_model_len"] - len(prompt)) - 1
            num_slots = self.config["num_kv_blocks"] * self.config["block_size"]
            assert not prompt or len(prompt) >= self.config["max_model_len"] or longest > num_slots
            return
        max_tokens = self.scheduler.sequence_info(first)["max_tokens"]
        for sample_index in range(min(num_samples, self.config["max_num_seqs"])):
            sequence_id = first + sample_index
            if sample_index:
                self.scheduler.add_sample(sequence_id, of=first)
            self.counts["sequences"] += 1
            self.prompts[sequence_id] = prompt
            self.outputs[sequence_id] = []
            self.options[sequence_id] = (priority, cache_key, deadline_us, sample_index)
            self.expected[sequence_id] = run_alone(prompt, max_tokens, {EOS, STOP} if stops else set(), sample_index)

    def abort(self, which):
        if not self.prompts:
            return
        sequence_id = len(self.prompts) - 1 - which % len(self.prompts)
        if sequence_id in self.expected:
            info = self.scheduler.sequence_info(sequence_id)
            state = "swapped out" if info["host_blocks"] else info["state"]
            self.counts["aborts in flight" if info["in_flight"] else f"aborts while {state}"] += 1
            assert self.scheduler.abort(sequence_id)
            assert self.scheduler.state(sequence_id) == "finished"
            del self.expected[sequence_id]
        else:
            self.counts["unknown aborts"] += 1
        assert not self.scheduler.abort(sequence_id)

    def abort_in_state(self, state):
        """The latest that is "preempted" or "waiting_for_kv", if any."""
        those = [i for i in self.expected if self.scheduler.state(i) == state]
        if those:
            self.abort(len(self.prompts) - 1 - those[-1])

    def abort_next_preempted(self):
        """Steps until somebody is preempted, or 30 times, and aborts whoever that is."""
        for _ in range(30):
            self.step()
            if self.scheduler.stats()["num_preempted"] or not self.scheduler.has_unfinished():
                break
        self.abort_in_state("preempted")

    def reset_prefix_cache(self):
        self.scheduler.reset_prefix_cache()
        self.counts["cache resets"] += 1

    def step(self, abort_in_flight=None, fails=False, duration_us=100):
        states = {i: self.scheduler.state(i) for i in self.expected}
        output = self.scheduler.schedule(self.now_us)
        self.scheduler.check_integrity()
        self.take_timeouts(output)
        self.check_output(output, {i for i, state in states.items() if state == "preempted"})
        self.check_bypasses([i for i, state in states.items() if state == "waiting" and i in self.expected])
        self.move_blocks(output.transfers)
        samples = self.run_model(output.scheduled)
        if fails and samples:
            samples[-1] = (samples[-1][0], None)
        if abort_in_flight is not None:
            self.abort(abort_in_flight)
            self.scheduler.check_integrity()
        running = set(self.expected)
        self.now_us += duration_us
        ended = {
            id_: (reason, tokens) for id_, reason, tokens in self.scheduler.update(output.step_id, samples, self.now_us)
        }
        for sequence_id, token in samples:
            if sequence_id in running:
                self.take_sample(sequence_id, token, ended.pop(sequence_id, None))
        assert not ended

    def finish(self):
        total = sum(len(self.prompts[i]) + len(tokens) for i, tokens in self.expected.items())
        limit = self.num_steps + 20 * total + 100
        while self.scheduler.has_unfinished():
            self.step()
            assert self.num_steps <= limit, "starved"
        self.scheduler.schedule(self.now_us)  # forgets the last that ended
        self.scheduler.check_integrity()
        assert not self.expected
        stats = self.scheduler.stats()
        assert stats["num_free_kv_blocks"] + stats["num_cached_kv_blocks"] == stats["num_kv_blocks"]
        for name in ("used_kv_blocks", "used_host_blocks", "kv_tokens", "waiting", "running", "queued_tokens"):
            assert stats[f"num_{name}"] == 0, name
        assert stats["num_finished"] == len(self.prompts)
        assert stats["num_steps"] == self.num_steps
        for name in ("swaps", "forks", "bypasses", "prefix_hit_tokens", "recomputed_tokens", "swapped_in_tokens"):
            self.counts[name.replace("_", " ")] += stats[f"num_{name}"]
        if not self.config["enable_prefix_caching"]:
            assert stats["num_prefix_hit_tokens"] == stats["num_cached_kv_blocks"] == 0

    # ---- Checks of a step ----

    def take_timeouts(self, output):
        for sequence_id in output.timed_out:
            self.counts["timeouts"] += 1
            assert self.options[sequence_id][2] <= self.now_us
            assert self.scheduler.sequence_info(sequence_id)["finish_reason"] == "timeout"
            del self.expected[sequence_id]
        for sequence_id in self.expected:
            deadline_us = self.options[sequence_id][2]
            assert deadline_us is None or deadline_us > self.now_us, "late"

    def check_output(self, output, preempted):
        config, stats = self.config, self.scheduler.stats()
        scheduled = output.scheduled
        assert bool(scheduled) == self.scheduler.has_unfinished(), "an idle step with work left"
        self.num_steps += bool(scheduled)
        num_tokens = sum(s.num_scheduled_tokens for s in scheduled)
        assert output.num_scheduled_tokens == num_tokens == output.num_prompt_tokens + output.num_decode_tokens
        assert num_tokens <= stats["token_budget"] <= config["max_num_batched_tokens"]
        assert len({s.sequence_id for s in scheduled}) == len(scheduled)
        assert len(scheduled) <= stats["num_running"] <= config["max_num_seqs"]
        if config["scheduling_policy"] in ("reserve", "static"):
            assert not output.preempted
        self.counts["preemptions"] += len(output.preempted)
        self.counts["full pools"] += stats["num_used_kv_blocks"] == stats["num_kv_blocks"]
        self.counts["steps with a full budget"] += num_tokens == config["max_num_batched_tokens"]
        self.check_prompts(scheduled, preempted)
        used = stats["num_free_kv_blocks"] + stats["num_cached_kv_blocks"] + stats["num_used_kv_blocks"]
        assert used == stats["num_kv_blocks"]

    def check_prompts(self, scheduled, preempted):
        """Decodes all get their token, and prompts keep to the prompt policy."""
        resumed = preempted & {s.sequence_id for s in scheduled}
        prompts = [s for s in scheduled if not self.is_decode(s) and s.sequence_id not in resumed]
        decodes = [s for s in scheduled if self.is_decode(s) and s.sequence_id not in resumed]
        threshold = self.config.get("long_prefill_token_threshold", 0)
        for s in prompts:
            assert not threshold or s.num_scheduled_tokens <= threshold
        if not self.config.get("enable_chunked_prefill", True):
            assert all(s.num_sample_rows for s in prompts), "a prompt was cut"
            self.counts["prompts whole"] += len(prompts)
            # Samples that take a prompt over compute its last token among decodes.
            assert not decodes or all(s.num_scheduled_tokens == 1 for s in prompts), "prompts and decodes mixed"
            if not decodes:
                return
        running = {s.sequence_id for s in scheduled}
        for sequence_id in self.expected:
            info = self.scheduler.sequence_info(sequence_id)
            left = len(self.prompts[sequence_id]) + info["num_output_tokens"] - info["num_computed_tokens"]
            is_decoding = info["state"] == "running" and info["num_output_tokens"] and left == 1
            assert not is_decoding or sequence_id in running, "a decode was skipped"

    def is_decode(self, s):
        length = len(self.prompts[s.sequence_id]) + len(self.outputs[s.sequence_id])
        return s.num_scheduled_tokens == 1 and s.first_token == length - 1 and bool(self.outputs[s.sequence_id])

    def check_bypasses(self, queued):
        """The longest-waiting sequence is passed at most max_bypass times by others of its class."""
        if not queued:
            return
        is_class = self.config.get("queue_order") == "priority"
        oldest = queued[0]
        if oldest != self.oldest:
            self.oldest, self.num_passed = oldest, 0
        started = [i for i in queued if i in self.expected and self.scheduler.state(i) != "waiting"]
        if oldest in started:
            return
        same = [i for i in started if not is_class or self.options[i][0] == self.options[oldest][0]]
        self.num_passed += len(same)
        assert self.num_passed <= (0 if is_class else self.config.get("max_bypass", 8))
        if is_class and started:
            assert max(self.options[i][0] for i in started) <= self.options[oldest][0], "a lower class went first"

    # ---- The model ----

    def move_blocks(self, transfers):
        for source_pool, source, destination_pool, destination in transfers:
            assert source < self.config["num_kv_blocks" if source_pool == 0 else "num_host_blocks"]
            assert destination < self.config["num_kv_blocks" if destination_pool == 0 else "num_host_blocks"]
            for offset in range(self.config["block_size"]):
                value = self.kv.pop((source_pool, source, offset), None)
                if value is not None:
                    self.kv[source_pool, source, offset] = value
                self.kv[destination_pool, destination, offset] = value
            event = {(0, 0): "copies", (0, 1): "blocks out", (1, 0): "blocks in"}[source_pool, destination_pool]
            self.counts[event] += 1

    def run_model(self, scheduled):
        """Writes every token of the step, then reads every context; returns (sequence, token) for each sample row."""
        block_size = self.config["block_size"]
        tables, values = {}, {}
        for s in scheduled:
            table = tables[s.sequence_id] = self.scheduler.block_table(s.sequence_id)
            tokens = self.prompts[s.sequence_id] + self.outputs[s.sequence_id]
            values[s.sequence_id] = key_values(tokens, self.options[s.sequence_id][1])
            end = s.first_token + s.num_scheduled_tokens
            assert s.num_scheduled_tokens >= 1
            assert s.num_sample_rows == (end == len(tokens))
            self.counts["prompt chunks"] += not s.num_sample_rows
            for position in range(s.first_token, end):
                slot = (0, table[position // block_size], position % block_size)
                self.kv[slot] = values[s.sequence_id][position]
        samples = []
        for s in scheduled:
            table, wanted = tables[s.sequence_id], values[s.sequence_id]
            end = s.first_token + s.num_scheduled_tokens
            for position in range(end):
                slot = (0, table[position // block_size], position % block_size)
                assert self.kv.get(slot) == wanted[position], f"KV of sequence {s.sequence_id} at {position}"
            if s.num_sample_rows:
                tokens = self.prompts[s.sequence_id] + self.outputs[s.sequence_id]
                samples.append((s.sequence_id, next_token(tokens, self.options[s.sequence_id][3])))
        return samples

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
