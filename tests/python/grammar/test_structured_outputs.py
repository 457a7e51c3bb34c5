"""Structured output: what requests get has the form they asked for, and a form that cannot be harms nobody."""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from steploop import (
    InvalidRequestError,
    LLMEngine,
    QueueFullError,
    SamplingParams,
    SteploopError,
    StructuredOutputsParams,
)
from steploop.outputs import RequestOutput

A = "ABCDEFGHIJKLMNOP"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def engine(demo_model: Path) -> Iterator[LLMEngine]:
    """The demo model, which the forms must lead."""
    with LLMEngine(model=demo_model, max_num_seqs=8, max_model_len=512, num_kv_blocks=256) as engine:
        yield engine


def run(engine: LLMEngine) -> dict[str, RequestOutput]:
    finished = {}
    while engine.has_unfinished_requests():
        finished.update({output.request_id: output for output in engine.step() if output.finished})
    return finished


def generate(engine: LLMEngine, form: StructuredOutputsParams, **params: Any) -> list[str]:
    sampling = {"temperature": 1.0, "seed": 1, "max_tokens": 100, "n": 4, **params}
    engine.add_request("a", "Answer: ", SamplingParams(structured_outputs=form, **sampling))
    outputs = run(engine)["a"].outputs
    assert {output.finish_reason for output in outputs} == {"stop"}
    return [output.text for output in outputs]


def test_output_is_json_of_the_schema(engine: LLMEngine) -> None:
    texts = generate(engine, StructuredOutputsParams(json=PERSON))
    for text in texts:
        person = json.loads(text)
        assert set(person) == {"name", "age"}
        assert len(person["name"]) <= 20
        assert 0 <= person["age"] <= 99
    assert len(set(texts)) > 1  # samples differ: each follows the grammar on its own
    assert generate(engine, StructuredOutputsParams(json=json.dumps(PERSON))) == texts


def test_output_without_free_whitespace(engine: LLMEngine) -> None:
    for text in generate(engine, StructuredOutputsParams(json=PERSON, disable_any_whitespace=True)):
        assert text == json.dumps(json.loads(text), ensure_ascii=False)


def test_output_matches_the_expression(engine: LLMEngine) -> None:
    for text in generate(engine, StructuredOutputsParams(regex=r"[A-Z][a-z]{2,8} \d{1,3}(, [a-z]{1,9})?")):
        assert re.fullmatch(r"[A-Z][a-z]{2,8} \d{1,3}(, [a-z]{1,9})?", text)


@pytest.mark.parametrize("choice", [["yes", "no"], ['a "quoted"\nline \\', "tab\tbed", "naïve 日本 🙂"]])
def test_output_is_a_choice(engine: LLMEngine, choice: list[str]) -> None:
    texts = generate(engine, StructuredOutputsParams(choice=choice), temperature=2.0, n=8)
    assert set(texts) <= set(choice)
    assert len(set(texts)) > 1


def test_output_is_of_the_grammar(engine: LLMEngine) -> None:
    grammar = 'root ::= term (" + " term)? "."\nterm ::= "x" | "y" | [0-9]'
    for text in generate(engine, StructuredOutputsParams(grammar=grammar)):
        assert re.fullmatch(r"[xy0-9]( \+ [xy0-9])?\.", text)


def test_output_is_an_object(engine: LLMEngine) -> None:
    engine.add_request(
        "a",
        'A JSON object: {"a": 1}\nAnother JSON object: ',
        SamplingParams(temperature=0.0, max_tokens=64, structured_outputs=StructuredOutputsParams(json_object=True)),
    )
    assert isinstance(json.loads(run(engine)["a"].outputs[0].text), dict)


def test_output_that_is_cut_short_is_a_beginning(engine: LLMEngine) -> None:
    engine.add_request(
        "a", "Answer: ", SamplingParams(max_tokens=3, seed=1, structured_outputs=StructuredOutputsParams(json=PERSON))
    )
    output = run(engine)["a"].outputs[0]
    assert output.finish_reason == "length"
    assert re.match(r"\{\s*(\"|$)", output.text)


def test_others_are_not_affected(engine: LLMEngine) -> None:
    plain = SamplingParams(max_tokens=24, temperature=1.0, seed=3)
    led = SamplingParams(max_tokens=60, seed=4, structured_outputs=StructuredOutputsParams(json=PERSON))
    alone = {}
    for name, params in (("plain", plain), ("led", led)):
        engine.add_request(name, "The weather is", params)
        alone[name] = run(engine)[name].outputs[0].token_ids
    for name, params in (("led", led), ("plain", plain)):
        engine.add_request(name, "The weather is", params)
    with pytest.raises(InvalidRequestError, match="cannot be compiled"):
        engine.add_request("bad", "x", SamplingParams(structured_outputs=StructuredOutputsParams(regex="[a-z")))
    together = run(engine)
    assert {name: output.outputs[0].token_ids for name, output in together.items()} == alone


def test_preempted_requests_keep_their_form(demo_model: Path) -> None:
    with LLMEngine(model=demo_model, max_num_seqs=8, max_model_len=64, num_kv_blocks=8, block_size=8) as engine:
        params = SamplingParams(
            max_tokens=50, seed=5, structured_outputs=StructuredOutputsParams(regex="([a-z]{3} ){20}[a-z]{3}")
        )
        for index in range(8):
            engine.add_request(str(index), "Words: ", params)
        outputs = run(engine)
    assert sum(output.metrics.num_preemptions for output in outputs.values()) > 0
    for output in outputs.values():
        assert re.fullmatch("([a-z]{3} ?)*[a-z]{0,3}", output.outputs[0].text)
        assert output.outputs[0].token_ids == outputs["0"].outputs[0].token_ids


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ({"regex": "[a-z"}, "Unclosed"),
        ({"grammar": "root ::= other"}, '"other" is not defined'),
        ({"json": {"type": "strin"}}, "Unsupported type"),
        ({"regex": "|".join(f"[{a}{b}{c}].*" for a in "abcdefghijklmnop" for b in A for c in A)}, "seconds to compile"),
        ({"regex": "(.{0,30000}[^a]{0,30000}){5}"}, "would slow every step|bytes compiled|seconds to compile"),
    ],
)
def test_forms_that_cannot_be_compiled(engine: LLMEngine, form: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        engine.add_request("a", "x", SamplingParams(structured_outputs=StructuredOutputsParams(**form)))
    assert not engine.has_unfinished_requests()
    # The compiler is still there.
    assert set(generate(engine, StructuredOutputsParams(choice=["on", "off"]))) <= {"on", "off"}


def test_compiler_is_started_again(engine: LLMEngine) -> None:
    compiler = engine._preparation._compiler
    assert compiler is not None
    generate(engine, StructuredOutputsParams(choice=["first"]))
    assert compiler._worker is not None
    compiler._worker.kill()
    compiler._worker.wait()
    with pytest.raises(InvalidRequestError, match="process has ended"):
        generate(engine, StructuredOutputsParams(choice=["second"]))
    assert generate(engine, StructuredOutputsParams(choice=["second"]), n=1) == ["second"]


def test_what_is_compiled_is_kept(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = engine._preparation._compiler
    assert compiler is not None
    generate(engine, StructuredOutputsParams(choice=["kept"]))
    monkeypatch.setattr(compiler, "_ask", lambda key: pytest.fail("it was compiled again"))
    assert generate(engine, StructuredOutputsParams(choice=["kept"]), n=1) == ["kept"]


SLOW = "|".join(f"[{a}{b}{c}].*" for a in "abcdefghijklmnop" for b in A for c in A)


def compile_in_thread(engine: LLMEngine, regex: str) -> threading.Thread:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex=regex))

    def run() -> None:
        with contextlib.suppress(SteploopError):
            engine.prepare_request("slow", "x", params)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_what_is_known_does_not_wait_for_slow_ones(engine: LLMEngine) -> None:
    generate(engine, StructuredOutputsParams(choice=["known"]))
    threads = [compile_in_thread(engine, SLOW + "x" * number) for number in range(1, 4)]
    compiler = engine._preparation._compiler
    assert compiler is not None
    while compiler._num_waiting < 3:
        time.sleep(0.01)
    assert generate(engine, StructuredOutputsParams(choice=["known"]), n=1) == ["known"]
    assert compiler._num_waiting > 0
    for number in range(4, 6):
        threads.append(compile_in_thread(engine, SLOW + "x" * number))
    while compiler._num_waiting < 4 and any(thread.is_alive() for thread in threads[3:]):
        time.sleep(0.01)
    with pytest.raises(QueueFullError, match="wait to be compiled"):
        generate(engine, StructuredOutputsParams(choice=["another"]))
    for thread in threads:
        thread.join()
    # What was refused is refused at once.
    began = time.thread_time()
    with pytest.raises(InvalidRequestError, match="seconds to compile"):
        generate(engine, StructuredOutputsParams(regex=SLOW + "x"))
    assert time.thread_time() - began < 1


def test_closing_does_not_wait_for_slow_ones(tiny_llama: Path) -> None:
    engine = LLMEngine(model=tiny_llama, num_kv_blocks=64)
    threads = [compile_in_thread(engine, SLOW + "x" * number) for number in range(3)]
    compiler = engine._preparation._compiler
    assert compiler is not None
    while compiler._worker is None:
        time.sleep(0.01)
    worker = compiler._worker
    engine.close()
    for thread in threads:
        thread.join()
    assert worker.poll() is not None
    assert compiler._worker is None


def ambiguous(symbol: str) -> StructuredOutputsParams:
    return StructuredOutputsParams(grammar=f'root ::= s\ns ::= s s | s s s | s s s s | "{symbol}"')


def test_grammars_that_are_slow_with_long_tokens(engine: LLMEngine) -> None:
    with pytest.raises(InvalidRequestError, match="would slow every step"):
        generate(engine, ambiguous("#"))


def test_grammars_that_turn_out_to_be_slow(engine: LLMEngine) -> None:
    engine.add_request("slow", "x", SamplingParams(max_tokens=400, structured_outputs=ambiguous("a"), n=2))
    engine.add_request("other", "x", SamplingParams(max_tokens=20, ignore_eos=True))
    outputs = run(engine)
    assert {output.finish_reason for output in outputs["slow"].outputs} == {"error"}
    assert outputs["other"].outputs[0].finish_reason == "length"


def test_closing_ends_the_process(tiny_llama: Path) -> None:
    engine = LLMEngine(model=tiny_llama, num_kv_blocks=64)
    engine.add_request("a", "x", SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a"])))
    compiler = engine._preparation._compiler
    assert compiler is not None
    worker = compiler._worker
    assert worker is not None
    engine.close()
    for _ in range(1000):
        if worker.poll() is not None:
            break
        time.sleep(0.01)
    assert worker.poll() is not None


def test_a_grammar_that_fails_ends_its_request_only(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: object, index: int, token_ids: list[int]) -> None:
        raise ValueError("the grammar takes too long")

    monkeypatch.setattr("steploop.grammar.mask.GrammarMask.accept", fail)
    with LLMEngine(model=tiny_llama, num_kv_blocks=64, num_threads=1) as engine:
        engine.add_request("a", "x", SamplingParams(structured_outputs=StructuredOutputsParams(regex="[a-z]*")))
        engine.add_request("b", "x", SamplingParams(max_tokens=8, ignore_eos=True))
        outputs = run(engine)
    assert outputs["a"].outputs[0].finish_reason == "error"
    assert outputs["b"].outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({}, "exactly one of json, regex, choice, grammar, json_object, got none"),
        ({"json_object": False}, "got none"),
        ({"regex": "a", "choice": ["a"]}, "got regex and choice"),
        ({"regex": 3}, "regex must be a string"),
        ({"grammar": ["a"]}, "grammar must be a string"),
        ({"choice": "yes"}, "choice must be a list of strings"),
        ({"choice": [1]}, "choice must be a list of strings"),
        ({"choice": []}, "a text or more"),
        ({"choice": ["a", ""]}, "a text or more"),
        ({"json": "{"}, "json must be a JSON schema"),
        ({"json": "[]"}, "json must be a JSON schema, an object"),
        ({"json": {"a": {1, 2}}}, "json must be a JSON schema"),
        ({"json_object": 1}, "json_object must be True or False"),
        ({"regex": "a", "disable_any_whitespace": "no"}, "disable_any_whitespace"),
        ({"regex": "a" * 200_000}, "at most 131072 bytes, got 200000"),
        ({"regex": "\ud800"}, "valid Unicode"),
        ({"regex": "a\0"}, "null characters"),
    ],
)
def test_forms_that_are_refused(form: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        StructuredOutputsParams(**form)


@pytest.mark.parametrize("params", [{"ignore_eos": True}, {"min_tokens": 1}])
def test_params_that_contradict_a_form(params: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="structured_outputs needs"):
        SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"), **params)


def test_a_form_is_no_dict() -> None:
    with pytest.raises(InvalidRequestError, match="must be StructuredOutputsParams"):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]
