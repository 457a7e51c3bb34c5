"""Tokenizers: from a GGUF file and a folder, chat templates, the beginning-of-sequence token, and bad input."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from steploop.errors import InvalidRequestError, ModelLoadError
from steploop.tokenizer import Tokenizer
from steploop.weights import TokenizerFiles

CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture
def tiny(tiny_tokenizer: Any) -> Tokenizer:
    return Tokenizer(tiny_tokenizer)


def test_demo_model(smollm: Tokenizer) -> None:
    assert smollm.decode(smollm.encode("Hello, wörld 123!")) == "Hello, wörld 123!"
    assert smollm.eos_token_id == 2
    assert smollm.render_chat(CHAT).endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert smollm.decode(smollm.encode_rendered("<|im_end|>")) == "<|im_end|>"
    assert smollm.decode([2, 0], skip_special_tokens=True) == ""


def test_folder(tiny_llama: Path, tiny: Tokenizer) -> None:
    loaded = Tokenizer.load(TokenizerFiles(path=str(tiny_llama)))
    assert loaded.encode("abc") == tiny.encode("abc")
    assert loaded.render_chat(CHAT) == tiny.render_chat(CHAT)


def test_gguf_beside_another_tokenizer(demo_model: Path, smollm: Tokenizer, tiny_llama: Path, tmp_path: Path) -> None:
    """A GGUF file's tokenizer is its own, whatever lies in the same folder."""
    folder = Path(shutil.copytree(tiny_llama, tmp_path / "model"))
    (folder / "model.gguf").symlink_to(demo_model)
    loaded = Tokenizer.load(TokenizerFiles(path=str(folder), gguf_file="model.gguf"))
    assert loaded.encode("Hello there") == smollm.encode("Hello there")
    assert loaded.render_chat(CHAT) == smollm.render_chat(CHAT)


def test_beginning_of_sequence_is_not_doubled(tiny: Tokenizer) -> None:
    assert tiny.encode("a")[0] == 0
    assert tiny.encode("a").count(0) == 1
    rendered = tiny.render_chat(CHAT)
    assert rendered.startswith("<s>")
    assert tiny.encode_rendered(rendered).count(0) == 1
    # A caller who renders the template and passes the text gets the same.
    assert tiny.encode(rendered) == tiny.encode_rendered(rendered)


def test_unknown_ids_have_no_text(smollm: Tokenizer) -> None:
    assert smollm.decode([49152, 10**6]) == ""


@pytest.mark.parametrize(
    "messages",
    [[], {}, "hi", ["hi"], [{}], [{"role": 3, "content": "x"}], [{"content": "x"}], None, [None], [{"role": "user"}]],
)
def test_bad_messages(smollm: Tokenizer, messages: Any) -> None:
    with pytest.raises(InvalidRequestError):
        smollm.render_chat(messages)


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no') }}",
        "{% for",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",  # the sandbox's business
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% include '/etc/passwd' %}",
        "{{ 1 / 0 }}",
        "{% for i in range(10 ** 9) %}x{% endfor %}",
    ],
)
def test_hostile_template(tiny_llama: Path, template: str) -> None:
    tokenizer = Tokenizer.load(TokenizerFiles(path=str(tiny_llama)))
    tokenizer.hf.chat_template = template
    with pytest.raises(InvalidRequestError, match="chat template"):
        tokenizer.render_chat(CHAT)


def test_no_template(tiny_llama: Path) -> None:
    tokenizer = Tokenizer.load(TokenizerFiles(path=str(tiny_llama)))
    tokenizer.hf.chat_template = None
    with pytest.raises(InvalidRequestError, match="no chat template"):
        tokenizer.render_chat(CHAT)


def test_half_a_surrogate_pair(tiny: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="valid Unicode"):
        tiny.encode("a\ud800")


def test_damaged_tokenizer(tiny_llama: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_llama, tmp_path / "model"))
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ModelLoadError, match="tokenizer"):
        Tokenizer.load(TokenizerFiles(path=str(folder)))


def test_code_of_a_model_is_never_run(tiny_llama: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_llama, tmp_path / "model"))
    trap = tmp_path / "trap"
    (folder / "custom.py").write_text(f"open({str(trap)!r}, 'w')\nclass Custom: pass\n")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Custom", "auto_map": {"AutoTokenizer": [None, "custom.Custom"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    try:
        Tokenizer.load(TokenizerFiles(path=str(folder)))
    except ModelLoadError:
        pass
    assert not trap.exists()


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def test_tools_and_variables_reach_the_template(tiny: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{% if tools %}{{ tools[0].function.name }} {% endif %}{{ mood }}{{ messages[0].content }}"
    monkeypatch.setattr(tiny.hf, "chat_template", template)
    assert tiny.render_chat(CHAT[-1:]) == "hi"
    assert tiny.render_chat(CHAT[-1:], tools=[TOOL], template_variables={"mood": "calm "}) == "add calm hi"


def test_a_template_that_knows_no_tools(tiny: Tokenizer) -> None:
    assert tiny.render_chat(CHAT, tools=[TOOL]) == tiny.render_chat(CHAT)


def test_the_template_for_tools_is_the_one_for_tools(tiny: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny.hf, "chat_template", {"default": "plain", "tool_use": "tools: {{ tools | length }}"})
    assert tiny.render_chat(CHAT) == "plain"
    assert tiny.render_chat(CHAT, tools=[TOOL]) == "tools: 1"


def test_the_last_message_is_continued(tiny: Tokenizer) -> None:
    chat = [*CHAT, {"role": "assistant", "content": "I am"}]
    assert tiny.render_chat(chat, add_generation_prompt=False, continue_final_message=True).endswith("I am")


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "conversation", "return_dict", "tools"])
def test_variables_that_are_none(tiny: Tokenizer, name: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"must not be called {name}"):
        tiny.render_chat(CHAT, template_variables={name: "{{ 1 }}"})
