"""Scripted scenarios of the native scheduler: members, tokens and blocks of every step, as tables (see stepping.py)."""

import pytest

from steploop.errors import RequestTooLongError

from .stepping import POLICIES, add, make_scheduler, rows, run_to_end, step


def test_sequences_join_and_leave_at_every_step():
    scheduler = make_scheduler(max_num_seqs=2)
    add(scheduler, 1, 4, 3)
    add(scheduler, 2, 6, 5)
    add(scheduler, 3, 2, 2)
    assert rows(scheduler, 6) == [
        ("1:0+4* 2:0+6*", "1[0] 2[1]", "", ""),
        ("1:4+1* 2:6+1*", "1[0] 2[1]", "", ""),
        ("1:5+1* 2:7+1*", "1[0] 2[1]", "", "1:length"),
        ("2:8+1* 3:0+2*", "2[1,0] 3[2]", "", ""),  # a block that was freed is the next to be used
        ("2:9+1* 3:2+1*", "2[1,0] 3[2]", "", "2:length 3:length"),
        ("", "", "", ""),
    ]


def test_static_admits_nobody_until_the_whole_batch_has_ended():
    scheduler = make_scheduler(max_num_seqs=2, scheduling_policy="static")
    add(scheduler, 1, 4, 3)
    add(scheduler, 2, 6, 5)
    add(scheduler, 3, 2, 2)
    assert rows(scheduler, 8) == [
        ("1:0+4* 2:0+6*", "1[0] 2[1]", "", ""),
        ("1:4+1* 2:6+1*", "1[0] 2[1]", "", ""),
        ("1:5+1* 2:7+1*", "1[0] 2[1]", "", "1:length"),
        ("2:8+1*", "2[1,0]", "", ""),
        ("2:9+1*", "2[1,0]", "", "2:length"),
        ("3:0+2*", "3[1]", "", ""),  # tables are freed tail first, so their first block is the next
        ("3:2+1*", "3[1]", "", "3:length"),
        ("", "", "", ""),
    ]


def test_prompts_are_cut_into_chunks_and_decodes_come_first():
    scheduler = make_scheduler(max_num_batched_tokens=8)
    add(scheduler, 1, 4, 6)
    add(scheduler, 2, 13, 3)
    add(scheduler, 3, 3, 1)
    assert rows(scheduler, 6) == [
        ("1:0+4* 2:0+4", "1[0] 2[1,2]", "", ""),  # blocks for the whole prompt at once
        ("1:4+1* 2:4+7", "1[0] 2[1,2]", "", ""),
        ("1:5+1* 2:11+2* 3:0+3*", "1[0] 2[1,2] 3[3]", "", "3:length"),
        ("1:6+1* 2:13+1*", "1[0] 2[1,2]", "", ""),
        ("1:7+1* 2:14+1*", "1[0] 2[1,2]", "", "2:length"),
        ("1:8+1*", "1[0,1]", "", "1:length"),
    ]


def test_static_chunks_prompts_too_and_later_members_wait_for_budget():
    scheduler = make_scheduler(max_num_batched_tokens=8, scheduling_policy="static")
    add(scheduler, 1, 12, 2)
    add(scheduler, 2, 3, 2)
    add(scheduler, 3, 9, 1)
    add(scheduler, 4, 120, 8)  # needs all 16 blocks for itself
    assert rows(scheduler, 4) == [
        ("1:0+8", "1[0,1]", "", ""),
        ("1:8+4* 2:0+3* 3:0+1", "1[0,1] 2[2] 3[3,4]", "", ""),
        ("1:12+1* 2:3+1* 3:1+6", "1[0,1] 2[2] 3[3,4]", "", "1:length 2:length"),
        ("3:7+2*", "3[3,4]", "", "3:length"),
    ]
    assert [row[0] for row in rows(scheduler, 2)] == ["4:0+8", "4:8+8"]


def test_admission_leaves_each_running_sequence_a_block_to_grow():
    scheduler = make_scheduler(num_kv_blocks=6, max_num_batched_tokens=16)
    add(scheduler, 1, 7, 26)
    add(scheduler, 2, 7, 16)
    add(scheduler, 3, 7, 3)
    # Admission leaves one block for each that runs: 3 fits beside both only while 6 - 2 >= 1 + 2.
    assert rows(scheduler, 2) == [
        ("1:0+7* 2:0+7* 3:0+2", "1[0] 2[1] 3[2]", "", ""),
        ("1:7+1* 2:7+1* 3:2+5*", "1[0] 2[1] 3[2]", "", ""),
    ]
    assert rows(scheduler, 2) == [
        ("1:8+1* 2:8+1* 3:7+1*", "1[0,3] 2[1,4] 3[2]", "", ""),
        ("1:9+1* 2:9+1* 3:8+1*", "1[0,3] 2[1,4] 3[2,5]", "", "3:length"),
    ]
    add(scheduler, 4, 6, 4)
    for _ in range(6):
        step(scheduler)
    assert scheduler.sequence_info(4)["state"] == "waiting"  # 2 free blocks: none would be left for 1 and 2
    # Both grow into the blocks that 3 gave back, and 2 ends before either needs another.
    assert rows(scheduler, 1) == [("1:16+1* 2:16+1*", "1[0,3,2] 2[1,4,5]", "", "")]
    for _ in range(4):
        step(scheduler)
    assert rows(scheduler, 1) == [("1:21+1* 2:21+1*", "1[0,3,2] 2[1,4,5]", "", "2:length")]
    assert run_to_end(scheduler) == {1: ("length", 26), 4: ("length", 4)}


def test_preemption_step_by_step():
    scheduler = make_scheduler(num_kv_blocks=4)
    add(scheduler, 1, 8, 18)
    add(scheduler, 2, 8, 10)
    add(scheduler, 3, 1, 2)
    step(scheduler)
    assert rows(scheduler, 1) == [("1:8+1* 2:8+1*", "1[0,2] 2[1,3]", "", "")]
    for _ in range(7):
        step(scheduler)
    assert scheduler.sequence_info(2)["num_output_tokens"] == 9
    # 1 needs a third block: 2, the later arrival, gives up both of its own, and nobody is admitted in that step.
    assert rows(scheduler, 1) == [("1:16+1*", "1[0,2,1]", "2", "")]
    info = scheduler.sequence_info(2)
    assert (info["state"], info["num_computed_tokens"], info["num_output_tokens"]) == ("preempted", 0, 9)
    assert (info["num_preemptions"], scheduler.block_table(2)) == (1, [])
    assert scheduler.stats() | {"num_waiting": 2, "num_preempted": 1, "num_preemptions": 1} == scheduler.stats()
    # It is at the front of the queue: 3, though small, must not overtake.
    assert [row[0] for row in rows(scheduler, 7)] == [f"1:{17 + i}+1*" for i in range(7)]
    assert rows(scheduler, 4) == [
        ("1:24+1*", "1[0,2,1,3]", "", "1:length"),
        ("2:0+17*", "2[0,2,1]", "", "2:length"),
        ("3:0+1*", "3[0]", "", ""),
        ("3:1+1*", "3[0]", "", "3:length"),
    ]
    assert scheduler.stats()["num_recomputed_tokens"] == 16  # the 17th had never been computed


def test_a_recomputed_prompt_counts_as_prompt_and_its_last_token_as_decode():
    scheduler = make_scheduler(num_kv_blocks=4)
    add(scheduler, 1, 8, 18)
    add(scheduler, 2, 8, 12)
    output = step(scheduler)[0]
    assert (output.num_prompt_tokens, output.num_decode_tokens, output.num_scheduled_tokens) == (16, 0, 16)
    output = step(scheduler)[0]
    assert (output.num_prompt_tokens, output.num_decode_tokens) == (0, 2)
    while not any(sequence_id == 1 for sequence_id, _, _ in step(scheduler)[2]):
        pass
    output = step(scheduler)[0]
    assert (output.num_prompt_tokens, output.num_decode_tokens) == (16, 1)


def test_a_sequence_without_a_block_preempts_itself_when_it_is_the_latest():
    scheduler = make_scheduler(num_kv_blocks=4)
    add(scheduler, 1, 1, 16)
    add(scheduler, 2, 8, 12)
    assert rows(scheduler, 10) == [
        ("1:0+1* 2:0+8*", "1[0] 2[1]", "", ""),
        *[(f"1:{i}+1* 2:{7 + i}+1*", "1[0] 2[1,2]", "", "") for i in range(1, 8)],
        ("1:8+1* 2:15+1*", "1[0,3] 2[1,2]", "", ""),
        ("1:9+1*", "1[0,3]", "2", ""),
    ]
    assert run_to_end(scheduler) == {1: ("length", 16), 2: ("length", 12)}


def test_the_same_sequence_is_preempted_many_times():
    scheduler = make_scheduler(num_kv_blocks=24, max_model_len=256, max_num_batched_tokens=256)
    # 4 comes back whenever an older one has ended, and goes again once the others have grown: it lasts longest.
    for sequence_id, max_tokens in ((1, 152), (2, 45), (3, 25)):
        add(scheduler, sequence_id, 40, max_tokens)
    add(scheduler, 4, 1, 150)
    preempted = []
    num_lost = 0
    ends = []
    while scheduler.has_unfinished():
        num_computed = scheduler.sequence_info(4)["num_computed_tokens"]
        output, _, ended = step(scheduler)
        preempted += output.preempted
        num_lost += num_computed if output.preempted else 0
        ends += [(sequence_id, len(tokens)) for sequence_id, _, tokens in ended]
    assert preempted == [4, 4, 4]
    assert scheduler.sequence_info(4)["num_preemptions"] == 3
    assert ends == [(3, 25), (2, 45), (1, 152), (4, 150)]
    assert scheduler.stats() | {"num_preemptions": 3, "num_recomputed_tokens": num_lost} == scheduler.stats()


def test_a_long_prompt_is_not_overtaken_by_short_ones():
    scheduler = make_scheduler(num_kv_blocks=8)
    add(scheduler, 1, 24, 20)
    add(scheduler, 2, 48, 4)
    add(scheduler, 3, 1, 1)
    for _ in range(20):
        assert [s.sequence_id for s in step(scheduler)[0].scheduled] == [1]
    assert [s.sequence_id for s in step(scheduler)[0].scheduled] == [2, 3]
    run_to_end(scheduler)


def test_five_long_prompts_in_49_blocks():
    """1,000 tokens can never fit 784 slots: each is refused at once, and those behind are served."""
    scheduler = make_scheduler(block_size=16, num_kv_blocks=49, max_model_len=2048, max_num_batched_tokens=512)
    for sequence_id in range(5):
        with pytest.raises(RequestTooLongError, match="1000 tokens and max_tokens is 16.* 64 KV blocks.* there are 49"):
            add(scheduler, sequence_id, 1000, 16)
        add(scheduler, 10 + sequence_id, 700, 16)
    assert scheduler.stats()["num_waiting"] == 5
    assert run_to_end(scheduler) == {10 + i: ("length", 16) for i in range(5)}
    assert scheduler.stats()["num_preemptions"] == 0  # only one fits at a time, and a second one is not tried


@pytest.mark.parametrize("policy", POLICIES)
def test_a_sequence_that_fills_the_pool_exactly(policy):
    scheduler = make_scheduler(num_kv_blocks=4, max_num_batched_tokens=16, scheduling_policy=policy)
    with pytest.raises(RequestTooLongError):
        add(scheduler, 0, 20, 14)
    add(scheduler, 1, 20, 13)  # the 13th output token is never computed: 32 tokens in 4 blocks of 8
    add(scheduler, 2, 32, 1)
    add(scheduler, 3, 1, 32)
    assert run_to_end(scheduler) == {1: ("length", 13), 2: ("length", 1), 3: ("length", 32)}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("budget", [1, 2, 3, 5])
def test_a_budget_smaller_than_the_number_of_sequences(policy, budget):
    scheduler = make_scheduler(max_num_seqs=8, max_num_batched_tokens=budget, scheduling_policy=policy)
    for sequence_id in range(8):
        add(scheduler, sequence_id, 3, 6)
    ends = {}
    num_steps = 0
    while scheduler.has_unfinished():
        output, _, ended = step(scheduler)
        num_steps += 1
        assert output.num_scheduled_tokens <= budget
        assert scheduler.stats()["num_running"] <= budget
        ends |= {sequence_id: reason for sequence_id, reason, _ in ended}
    assert ends == dict.fromkeys(range(8), "length")
    assert num_steps <= 8 * 8


def test_running_sequences_all_get_tokens_in_every_step():
    scheduler = make_scheduler(max_num_seqs=8, max_num_batched_tokens=4, num_kv_blocks=64)
    for sequence_id in range(8):
        add(scheduler, sequence_id, 2, 30)
    while scheduler.has_unfinished():
        num_running = len(step(scheduler)[0].scheduled)
        assert scheduler.stats()["num_running"] <= num_running
