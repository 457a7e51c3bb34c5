"""Steps of the native scheduler without a model, as rows of a table.

A row reads: `1:0+8` sequence 1 computes 8 tokens from position 0 on, `*` it reaches its last token and gets a sample;
then the block tables after schedule, then what was preempted, then what ended. Every sample is token 7.
"""

from steploop._C import Scheduler, SchedulerConfig

POLICIES = ["on_demand", "reserve", "estimate", "static"]


def make_scheduler(**overrides):
    settings = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 128,
        "num_kv_blocks": 16,
        "block_size": 8,
        "enable_prefix_caching": False,  # all prompts are alike
    }
    return Scheduler(SchedulerConfig(**(settings | overrides)))


def add(scheduler, sequence_id, num_prompt_tokens, max_tokens, **options):
    scheduler.add(sequence_id, [5] * num_prompt_tokens, max_tokens=max_tokens, **options)


def samples_of(output, token=7):
    return [(s.sequence_id, token) for s in output.scheduled if s.num_sample_rows]


def step(scheduler, token=7, now_us=0):
    """One step as (the output, the row for a table, the ended sequences)."""
    output = scheduler.schedule(now_us)
    scheduler.check_integrity()
    scheduled = " ".join(
        f"{s.sequence_id}:{s.first_token}+{s.num_scheduled_tokens}{'*' if s.num_sample_rows else ''}"
        for s in output.scheduled
    )
    blocks = " ".join(
        f"{s.sequence_id}[{','.join(map(str, scheduler.block_table(s.sequence_id)))}]" for s in output.scheduled
    )
    ended = scheduler.update(output.step_id, samples_of(output, token), now_us)
    scheduler.check_integrity()
    preempted = " ".join(map(str, output.preempted))
    row = (scheduled, blocks, preempted, " ".join(f"{sequence_id}:{reason}" for sequence_id, reason, _ in ended))
    return output, row, ended


def rows(scheduler, num_steps):
    return [step(scheduler)[1] for _ in range(num_steps)]


def run_to_end(scheduler, max_steps=10_000):
    """Steps until nothing is unfinished; returns {id: (finish reason, number of output tokens)}."""
    ends = {}
    for _ in range(max_steps):
        if not scheduler.has_unfinished():
            break
        ends |= {sequence_id: (reason, len(tokens)) for sequence_id, reason, tokens in step(scheduler)[2]}
    assert not scheduler.has_unfinished()
    assert scheduler.stats()["num_used_kv_blocks"] == 0
    return ends
