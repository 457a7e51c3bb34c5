"""What the operators refuse, and how they behave under torch's tracing and threads."""

import pytest
import torch

from steploop.ops import new_kv_cache

ops = torch.ops.steploop

FLOAT, HALF, BF16, INT, LONG = torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64


def zeros(*shape, dtype=FLOAT):
    return torch.zeros(*shape, dtype=dtype)


def attention_arguments(**changes):
    arguments = {
        "q": zeros(2, 4, 64),
        "kv_cache": new_kv_cache(3, 2, 16, 64, FLOAT),
        "block_tables": torch.tensor([[1, 9]], dtype=INT),
        "cu_seqlens_q": torch.tensor([0, 2], dtype=INT),
        "seq_lens": torch.tensor([5], dtype=INT),
        "scale": 0.125,
    }
    return arguments | changes


def rope_arguments(**changes):
    arguments = {
        "qkv": zeros(3, 8 * 64),
        "positions": zeros(3, dtype=INT),
        "cos": zeros(10, 32),
        "sin": zeros(10, 32),
        "slot_mapping": torch.arange(3),
        "kv_cache": new_kv_cache(3, 2, 16, 64, FLOAT),
        "num_heads": 4,
    }
    return arguments | changes


def packed(rows=6, columns=8, dtype=FLOAT):
    return ops.pack_linear(zeros(rows, columns, dtype=dtype))


REFUSED = [
    ("embedding", lambda: (zeros(3, dtype=LONG), zeros(5, 8)), "token_ids must be int32, got int64"),
    ("embedding", lambda: (torch.tensor([0, 5], dtype=INT), zeros(5, 8)), r"token_ids must be in 0..4, got 5 at 1"),
    ("embedding", lambda: (torch.tensor([-1], dtype=INT), zeros(5, 8)), r"token_ids must be in 0..4, got -1 at 0"),
    ("embedding", lambda: (zeros(1, dtype=INT), zeros(5)), "table must have 2 dimensions, got 1"),
    ("rms_norm", lambda: (zeros(2, 8), zeros(1, 8), 1e-5), "weight must have 1 dimension, got 2"),
    ("rms_norm", lambda: (zeros(2, 8), zeros(9), 1e-5), "weight must have size 8 in dimension 0, got 9"),
    ("rms_norm", lambda: (zeros(2, 8, dtype=BF16), zeros(8), 1e-5), "x must be float32, got bfloat16"),
    ("rms_norm", lambda: (zeros(8, 2).t(), zeros(8), 1e-5), "x must be contiguous"),
    ("rms_norm", lambda: (zeros(()), zeros(8), 1e-5), "x must have 1 dimension or more, got 0"),
    ("rms_norm", lambda: (zeros(2, 0), zeros(0), 1e-5), "x must have a last dimension of size > 0, got 0"),
    ("rms_norm", lambda: (zeros(2, 8), zeros(8), 1e-5, HALF), "out_dtype must be float32 or bfloat16, got float16"),
    ("add_rms_norm", lambda: (zeros(2, 8), zeros(1, 8), zeros(8), 1e-5), "residual must have the shape of x"),
    ("silu_and_mul", lambda: (zeros(2, 7),), "gate_up must have an even last dimension, got 7"),
    ("log_softmax", lambda: (zeros(2, 7, dtype=torch.float64),), "logits must be float32, got float64"),
    ("argmax", lambda: (zeros(()),), "logits must have 1 dimension or more, got 0"),
    ("pack_linear", lambda: (zeros(4, 8, dtype=HALF),), "weight must be float32 or bfloat16, got float16"),
    ("pack_linear", lambda: (zeros(4, 7),), "weight must have an even size in dimension 1, got 7"),
    ("pack_linear", lambda: (zeros(4, 8), zeros(5)), "bias must have size 4 in dimension 0, got 5"),
    ("pack_gate_up", lambda: (zeros(4, 8), zeros(5, 8)), "up must have size 4 in dimension 0, got 5"),
    ("linear", lambda: (zeros(2, 8), packed(dtype=BF16), 6), "x must be bfloat16, got float32"),
    ("linear", lambda: (zeros(2, 9), packed(), 6), "x must have size 8 in its last dimension, got 9"),
    ("linear", lambda: (zeros(2, 8), packed(), 7), "out_features must be 6, got 7"),
    ("linear", lambda: (zeros(2, 8), zeros(4096, dtype=torch.uint8), 6), "packed must be the tensor that pack_linear"),
    ("linear", lambda: (zeros(2, 8), zeros(6, 8), 6), "packed must have 1 dimension, got 2"),
    ("add_linear", lambda: (zeros(3, 6), zeros(2, 8), packed()), "out must have the shape of x with a last dim"),
    ("linear_silu_and_mul", lambda: (zeros(2, 8), packed(), 6), "packed must be the tensor that pack_gate_up"),
    ("kv_write", lambda: (zeros(1, 2, 64), zeros(1, 2, 64), torch.tensor([48]), new_kv_cache(3, 2, 16, 64, FLOAT)),
     r"slot_mapping must be in 0..47, got 48 at 0"),
    ("kv_write", lambda: (zeros(1, 2, 64), zeros(1, 3, 64), torch.tensor([0]), new_kv_cache(3, 2, 16, 64, FLOAT)),
     "value must have size 2 in dimension 1, got 3"),
    ("kv_read", lambda: (new_kv_cache(3, 2, 12, 64, FLOAT), zeros(1, dtype=LONG)),
     "kv_cache must have blocks of 8, 16, 32 or 64 tokens in dimension 3, got 12"),
    ("kv_read", lambda: (new_kv_cache(3, 2, 16, 72, FLOAT), zeros(1, dtype=LONG)),
     "kv_cache must have a head_dim of 64, 80, 96, 128 or 256 in dimension 4, got 72"),
    ("kv_read", lambda: (zeros(3, 2, 16, 64), zeros(1, dtype=LONG)), "kv_cache must have 5 dimensions, got 4"),
    ("rope_kv_write", lambda: rope_arguments(num_heads=3), "num_heads must be a multiple of 2, the kv heads, got 3"),
    ("rope_kv_write", lambda: rope_arguments(positions=torch.tensor([0, 10, 0], dtype=INT)),
     r"positions must be in 0..9, got 10 at 1"),
    ("rope_kv_write", lambda: rope_arguments(slot_mapping=torch.tensor([0, -1, 2])),
     r"slot_mapping must be in 0..47, got -1 at 1"),
    ("rope_kv_write", lambda: rope_arguments(sin=zeros(9, 32)), "sin must have size 10 in dimension 0, got 9"),
    ("rope_kv_write", lambda: rope_arguments(k_norm=zeros(32)), "k_norm must have size 64 in dimension 0, got 32"),
    ("paged_attention", lambda: attention_arguments(q=zeros(2, 3, 64)),
     "q must have a multiple of 2, the kv heads, in dimension 1, got 3"),
    ("paged_attention", lambda: attention_arguments(q=zeros(2, 4, 64, dtype=BF16)), "q must be float32, got bfloat16"),
    ("paged_attention", lambda: attention_arguments(seq_lens=torch.tensor([33], dtype=INT)),
     r"seq_lens must hold the sequence's query tokens \(2\) and fit its block table \(32 tokens\), got 33 at 0"),
    ("paged_attention", lambda: attention_arguments(seq_lens=torch.tensor([1], dtype=INT)),
     r"seq_lens must hold the sequence's query tokens \(2\) .*, got 1 at 0"),
    ("paged_attention", lambda: attention_arguments(seq_lens=torch.tensor([17], dtype=INT)),
     r"block_tables must be in 0..2, got 9 at \[0, 1\]"),
    ("paged_attention", lambda: attention_arguments(cu_seqlens_q=torch.tensor([0, 1], dtype=INT)),
     "cu_seqlens_q must go from 0 to 2, the rows of q, got 0 to 1"),
    ("paged_attention", lambda: attention_arguments(cu_seqlens_q=torch.tensor([0], dtype=INT)),
     "cu_seqlens_q must have size 2 in dimension 0, got 1"),
    ("paged_attention", lambda: attention_arguments(block_tables=zeros(2, 2, dtype=INT), seq_lens=zeros(2, dtype=INT),
                                                    cu_seqlens_q=torch.tensor([0, 2**31 - 1, 2], dtype=INT)),
     "cu_seqlens_q must not decrease, but does at or after 1"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("op", "arguments", "message"), REFUSED, ids=[f"{case[0]}-{i}" for i, case in enumerate(REFUSED)]
)
def test_wrong_arguments_are_refused(op, arguments, message):
    given = arguments()
    with pytest.raises(RuntimeError, match=f"^{op}: {message}"):
        getattr(ops, op)(**given) if isinstance(given, dict) else getattr(ops, op)(*given)


def test_unknown_instruction_set_is_refused(monkeypatch):
    monkeypatch.setenv("STEPLOOP_CPU_ISA", "quantum")
    with pytest.raises(RuntimeError, match="must be one that this processor has, .*portable; got quantum"):
        ops.rms_norm(zeros(2, 8), zeros(8), 1e-5)


CHECKED = {
    "embedding": lambda: (torch.tensor([1, 2], dtype=INT), torch.ones(5, 8)),
    "rms_norm": lambda: (torch.ones(2, 8), torch.ones(8), 1e-5, BF16),
    "add_rms_norm": lambda: (torch.ones(2, 8), torch.ones(2, 8), torch.ones(8), 1e-5),
    "silu_and_mul": lambda: (torch.ones(2, 3, 8),),
    "log_softmax": lambda: (torch.ones(2, 8),),
    "argmax": lambda: (torch.ones(2, 8),),
    "kv_write": lambda: (
        torch.ones(1, 2, 64),
        torch.ones(1, 2, 64),
        torch.tensor([3]),
        new_kv_cache(1, 2, 8, 64, FLOAT),
    ),
    "kv_read": lambda: (new_kv_cache(1, 2, 8, 64, BF16), torch.tensor([3, 4])),
    "rope_kv_write": lambda: tuple(rope_arguments().values()),
    "paged_attention": lambda: tuple(attention_arguments().values()),
}


@pytest.mark.parametrize("op", CHECKED)
def test_schema_and_traced_shapes_are_right(op):
    """What the schema says is written is written, and shapes computed without data are those of a real run."""
    torch.library.opcheck(getattr(ops, op).default, CHECKED[op](), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("op", ["linear", "linear_silu_and_mul"])
def test_traced_shapes_of_linear_layers(op):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        out = getattr(ops, op)(torch.ones(2, 3, 8, dtype=BF16), zeros(64, dtype=torch.uint8), 6)
    assert out.shape == (2, 3, 6)
    assert out.dtype == (FLOAT if op == "linear" else BF16)


def test_results_do_not_depend_on_the_number_of_threads():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 576, generator=generator)
    weight = ops.pack_linear(torch.randn(500, 576, generator=generator))
    cache = new_kv_cache(60, 3, 16, 64, FLOAT)
    key, value = (torch.randn(900, 3, 64, generator=generator) for _ in range(2))
    ops.kv_write(key, value, torch.arange(900), cache)
    tables = torch.arange(60, dtype=INT).view(1, 60)
    lengths = torch.tensor([0, 300], dtype=INT), torch.tensor([900], dtype=INT)

    def run_all():
        return [
            ops.rms_norm(x, x[0].clone(), 1e-5),
            ops.linear(x, weight, 500),
            ops.linear(x[:40].contiguous(), weight, 500),
            ops.silu_and_mul(x),
            ops.log_softmax(x),
            ops.paged_attention(x.view(300, 9, 64), cache, tables, *lengths, 0.125),
        ]

    before = torch.get_num_threads()
    try:
        results = []
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            results.append(run_all())
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
