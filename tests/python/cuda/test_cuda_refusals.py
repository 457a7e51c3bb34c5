"""What the CUDA operators refuse."""

import pytest
import torch

import steploop.ops  # noqa: F401  (loads torch.ops.steploop_cuda)

FLOAT, DOUBLE, HALF, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
INT, LONG, BYTE = torch.int32, torch.int64, torch.uint8


def zeros(*shape, dtype=FLOAT):
    return torch.zeros(*shape, dtype=dtype)


def host(values, dtype=INT):
    return torch.tensor(values, dtype=dtype)


# Arguments as they are accepted; those of HOST stay on the CPU.
HOST = {"cu_seqlens_q", "seq_lens", "temperature", "top_k", "top_p", "seed", "sample_index", "position"}
ACCEPTED = {
    "embedding": lambda: {"token_ids": zeros(3, dtype=INT), "table": zeros(5, 8, dtype=BF16)},
    "gather_rows": lambda: {"x": zeros(3, 8), "rows": zeros(2, dtype=INT)},
    "rms_norm": lambda: {"x": zeros(2, 8), "weight": zeros(8), "eps": 1e-5},
    "add_rms_norm": lambda: {"x": zeros(2, 8), "residual": zeros(2, 8), "weight": zeros(8), "eps": 1e-5},
    "silu_and_mul": lambda: {"gate_up": zeros(2, 48)},
    "rope_kv_write": lambda: {
        "qkv": zeros(3, 8 * 64),
        "positions": zeros(3, dtype=INT),
        "cos": zeros(10, 32),
        "sin": zeros(10, 32),
        "slot_mapping": torch.arange(3),
        "kv_cache": zeros(3, 2, 2, 16, 64, dtype=BF16),
        "num_heads": 4,
    },
    "paged_attention": lambda: {
        "q": zeros(2, 4, 64, dtype=BF16),
        "kv_cache": zeros(3, 2, 2, 16, 64, dtype=BF16),
        "block_tables": host([[1, 2]]),
        "cu_seqlens_q": host([0, 2]),
        "seq_lens": host([5]),
        "scale": 0.125,
    },
    "transfer_blocks": lambda: {"src": zeros(3, 8), "dst": zeros(4, 8), "pairs": zeros(1, 2, dtype=INT)},
    "linear": lambda: {"x": zeros(2, 8, dtype=BF16), "weight": zeros(6, 8, dtype=BF16)},
    "add_linear": lambda: {"out": zeros(2, 6), "x": zeros(2, 8, dtype=BF16), "weight": zeros(6, 8, dtype=BF16)},
    "linear_silu_and_mul": lambda: {"x": zeros(2, 8, dtype=HALF), "gate_up": zeros(16, 8, dtype=HALF)},
    "linear_epilogue": lambda: {
        "product": zeros(2, 16, dtype=BF16),
        "bias": None,
        "out": zeros(2, 16),
        "epilogue": 0,
    },
    "sample": lambda: {
        "logits": zeros(2, 9),
        "temperature": host([0, 1], DOUBLE),
        "top_k": host([0, 3]),
        "top_p": host([1, 0.5], DOUBLE),
        "seed": host([1, 2], LONG),
        "sample_index": host([0, 0]),
        "position": host([5, 6], LONG),
    },
}

REFUSED = [
    ("embedding", {"token_ids": zeros(3, dtype=LONG)}, "token_ids must be int32, got int64"),
    ("embedding", {"table": zeros(5, dtype=BF16)}, "table must have 2 dimensions, got 1"),
    ("embedding", {"table": zeros(5, 8, dtype=DOUBLE)}, "table must be float32, bfloat16 or float16, got float64"),
    ("embedding", {"table": zeros(5, 12, dtype=BF16)}, "table must have a multiple of 8 in dimension 1, got 12"),
    ("embedding", {"table": zeros(100, dtype=BF16)[1:41].view(5, 8)}, "table must start at a multiple of 16 bytes"),
    ("gather_rows", {"x": zeros(3, 8, dtype=BF16)}, "x must be float32, got bfloat16"),
    ("gather_rows", {"x": zeros(3, 6)}, "x must have a multiple of 4 in dimension 1, got 6"),
    ("gather_rows", {"rows": zeros(2, dtype=LONG)}, "rows must be int32, got int64"),
    ("rms_norm", {"weight": zeros(1, 8)}, "weight must have 1 dimension, got 2"),
    ("rms_norm", {"weight": zeros(9)}, "weight must have size 8 in dimension 0, got 9"),
    ("rms_norm", {"x": zeros(2, 8, dtype=BF16)}, "x must be float32, got bfloat16"),
    ("rms_norm", {"x": zeros(8, 2).t()}, "x must be contiguous"),
    ("rms_norm", {"x": zeros(())}, "x must have 1 dimension or more, got 0"),
    ("rms_norm", {"x": zeros(2, 12)}, "x must have a multiple of 8 in dimension 1, got 12"),
    ("rms_norm", {"x": zeros(1, 16392)}, "x must have at most 16384 in its last dimension, got 16392"),
    ("rms_norm", {"out_dtype": DOUBLE}, "out_dtype must be float32, bfloat16 or float16, got float64"),
    ("add_rms_norm", {"residual": zeros(1, 8)}, "residual must have the shape of x"),
    ("silu_and_mul", {"gate_up": zeros(2, 24)}, "gate_up must have a multiple of 16 in dimension 1, got 24"),
    ("silu_and_mul", {"group": 16}, "group must be 0 or a multiple of 8 that divides 24, got 16"),
    ("silu_and_mul", {"group": 12}, "group must be 0 or a multiple of 8 that divides 24, got 12"),
    ("rope_kv_write", {"num_heads": 3}, "num_heads must be a multiple of 2, the kv heads, got 3"),
    ("rope_kv_write", {"qkv": zeros(3, 7 * 64)}, "qkv must have size 512 in dimension 1, got 448"),
    ("rope_kv_write", {"kv_cache": zeros(3, 2, 2, 16, 64)}, "kv_cache must be bfloat16 or float16, got float32"),
    ("rope_kv_write", {"sin": zeros(9, 32)}, "sin must have size 10 in dimension 0, got 9"),
    ("rope_kv_write", {"slot_mapping": zeros(3, dtype=INT)}, "slot_mapping must be int64, got int32"),
    ("rope_kv_write", {"k_norm": zeros(32)}, "k_norm must have size 64 in dimension 0, got 32"),
    ("paged_attention", {"kv_cache": zeros(3, 2, 16, 64, dtype=BF16)}, "kv_cache must have 5 dimensions, got 4"),
    (
        "paged_attention",
        {"kv_cache": zeros(3, 2, 2, 12, 64, dtype=BF16)},
        "kv_cache must have blocks of 8, 16, 32 or 64 tokens in dimension 3, got 12",
    ),
    (
        "paged_attention",
        {"kv_cache": zeros(3, 2, 2, 16, 80, dtype=BF16)},
        "kv_cache must have a head_dim of 64, 96, 128 or 256 in dimension 4, got 80",
    ),
    (
        "paged_attention",
        {"q": zeros(2, 3, 64, dtype=BF16)},
        "q must have a multiple of 2, the kv heads, in dimension 1, got 3",
    ),
    ("paged_attention", {"q": zeros(2, 130, 64, dtype=BF16)}, "q must have at most 64 heads per kv head, got 65"),
    ("paged_attention", {"q": zeros(2, 4, 64, dtype=HALF)}, "q must be bfloat16, got float16"),
    (
        "paged_attention",
        {"seq_lens": host([33])},
        r"seq_lens must hold the sequence's query tokens \(2\) and fit its block table \(32 tokens\), got 33 at 0",
    ),
    (
        "paged_attention",
        {"seq_lens": host([1])},
        r"seq_lens must hold the sequence's query tokens \(2\) .*, got 1 at 0",
    ),
    (
        "paged_attention",
        {"cu_seqlens_q": host([0, 1])},
        "cu_seqlens_q must go from 0 to 2, the rows of q, got 0 to 1",
    ),
    ("paged_attention", {"cu_seqlens_q": host([0])}, "cu_seqlens_q must have size 2 in dimension 0, got 1"),
    (
        "paged_attention",
        {"block_tables": host([[1], [1]]), "seq_lens": host([0, 2]), "cu_seqlens_q": host([0, 2**31 - 1, 2])},
        "cu_seqlens_q must not decrease, but does at or after 1",
    ),
    ("paged_attention", {"scale": 0.0}, "scale must be > 0, got 0"),
    ("paged_attention", {"small_rows": 17}, "small_rows must be in 0..16, got 17"),
    ("paged_attention", {"target_items": -1}, "target_items must be in 0..1048576, got -1"),
    ("transfer_blocks", {"src": zeros(3, 6)}, "src must have blocks of a multiple of 16 bytes, got 24"),
    ("transfer_blocks", {"dst": zeros(4, 4)}, "dst must have blocks of 32 bytes, as src has, got 16"),
    ("transfer_blocks", {"pairs": zeros(2, dtype=INT)}, "pairs must have 2 dimensions, got 1"),
    ("linear", {"x": zeros(2, 8)}, "x must be bfloat16 or float16, got float32"),
    ("linear", {"x": zeros(2, 8, dtype=HALF)}, "weight must be float16, got bfloat16"),
    ("linear", {"x": zeros(2, 16, dtype=BF16)}, "weight must have size 16 in dimension 1, got 8"),
    ("linear", {"x": zeros(2, 12, dtype=BF16)}, "x must have a multiple of 8 in dimension 1, got 12"),
    ("linear", {"weight": zeros(0, 8, dtype=BF16)}, "weight must have size > 0 in dimension 0, got 0"),
    ("linear", {"bias": zeros(6, dtype=BF16)}, "bias must be float32, got bfloat16"),
    ("add_linear", {"out": zeros(3, 6)}, "out must have the shape of x with a last dimension of 6"),
    (
        "linear_silu_and_mul",
        {"gate_up": zeros(24, 8, dtype=HALF)},
        "gate_up must have a multiple of 16 in dimension 0, got 24",
    ),
    ("linear_epilogue", {"epilogue": 3}, r"epilogue must be 0 \(store\), 1 \(add\) or 2 \(silu and mul\), got 3"),
    ("linear_epilogue", {"epilogue": 2}, "out must have size 8 in dimension 1, got 16"),
    ("linear_epilogue", {"product": zeros(2, 16)}, "product must be bfloat16 or float16, got float32"),
    ("sample", {"logits": zeros(2, 9, dtype=BF16)}, "logits must be float32, got bfloat16"),
    ("sample", {"logits": zeros(2, 0)}, "logits must have 1..524288 in dimension 1, got 0"),
    ("sample", {"top_k": host([1])}, "top_k must have size 2 in dimension 0, got 1"),
    ("sample", {"top_k": host([1, -2])}, "top_k must be >= 1, or 0 or -1 for all, got -2 at 1"),
    ("sample", {"top_p": host([0, 1], DOUBLE)}, r"top_p must be in \(0, 1\], got 0.0* at 0"),
    ("sample", {"temperature": host([1, -1], DOUBLE)}, "temperature must be >= 0 and finite, got -1.0* at 1"),
    ("sample", {"masked_tokens": host([[1], [9]])}, "masked_tokens must be below 9, got 9 at 1"),
    ("sample", {"masked_tokens": host([[1, 2], [3, 3]])}, "masked_tokens must not name a token twice, got 3 at 1"),
    ("sample", {"masked_tokens": zeros(2, 65, dtype=INT)}, "masked_tokens must have at most 64 in dimension 1, got 65"),
]


def on_device(ops, arguments):
    """Without changing strides or where in its memory a tensor starts."""

    def move(name, value):
        if not isinstance(value, torch.Tensor) or name in HOST or ops.device == "cpu" or name == "masked_tokens":
            return value
        moved = torch.zeros(value.storage_offset() + value.numel(), dtype=value.dtype, device=ops.device)
        return moved.as_strided(value.shape, value.stride(), value.storage_offset())

    return {name: move(name, value) for name, value in arguments.items()}


@pytest.mark.parametrize("op", ACCEPTED)
def test_arguments_are_accepted_before_they_are_changed(ops, op):
    getattr(ops, op)(**on_device(ops, ACCEPTED[op]()))


@pytest.mark.parametrize(
    ("op", "changes", "message"), REFUSED, ids=[f"{case[0]}-{i}" for i, case in enumerate(REFUSED)]
)
def test_wrong_arguments_are_refused(ops, op, changes, message):
    with pytest.raises(RuntimeError, match=f"^{op}: {message}"):
        getattr(ops, op)(**on_device(ops, ACCEPTED[op]() | changes))


@pytest.mark.parametrize("op", ACCEPTED)
def test_operators_for_cuda_do_not_take_tensors_on_the_cpu(op):
    with pytest.raises(NotImplementedError, match=f"steploop_cuda::{op}.* 'CPU' backend"):
        getattr(torch.ops.steploop_cuda, op)(**ACCEPTED[op]())


def test_every_operator_is_tested_here(ops):
    """Both libraries have the same operators; matmul_address takes nothing that could be refused."""
    for namespace in ("steploop_cuda", "steploop_emulated" if ops.device == "cpu" else "steploop_cuda"):
        names = {
            name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith(f"{namespace}::")
        }
        assert names == {*ACCEPTED, "matmul_address"}


def test_a_kernels_error_is_an_exception(ops, monkeypatch):
    if ops.device != "cpu":
        return
    monkeypatch.setenv("STEPLOOP_EMULATED_FAULT", "launch:2")
    with pytest.raises(RuntimeError, match="^rms_norm: out of memory"):
        ops.rms_norm(zeros(2, 8), zeros(8), 1e-5)
    monkeypatch.undo()
    assert ops.rms_norm(zeros(2, 8), zeros(8), 1e-5).shape == (2, 8)


@pytest.mark.gpu
def test_devices_do_not_mix():
    ops = torch.ops.steploop_cuda
    x, weight = zeros(2, 8).cuda(), zeros(8)
    with pytest.raises(RuntimeError, match="^rms_norm: weight must be on cuda:0, the device of x, got cpu"):
        ops.rms_norm(x, weight, 1e-5)
    arguments = on_device(type("Device", (), {"device": "cuda"}), ACCEPTED["sample"]())
    with pytest.raises(RuntimeError, match="^sample: top_k must be on the CPU, got cuda:0"):
        ops.sample(**arguments | {"top_k": arguments["top_k"].cuda()})
