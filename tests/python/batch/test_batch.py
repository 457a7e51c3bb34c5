"""`steploop batch` as a person or a script runs it."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from steploop import InvalidArgumentError, LLMEngine, RequestTooLongError
from steploop.batch import run_batch
from steploop.batch.runner import QUEUE_FACTOR
from steploop.cli import main
from steploop.progress import RequestProgress
from steploop.request_state import RequestState

from .lines import OPTIONS, answers, chat, completion, read_records, write_lines

Capture = pytest.CaptureFixture[str]
Run = Callable[..., int]


@pytest.fixture
def batch(packed_llama: Path, tmp_path: Path) -> Run:
    """Runs the command on tmp_path's in.jsonl; returns its exit code."""

    def run(*arguments: str, output: str = "out.jsonl") -> int:
        return main(
            ["batch", str(packed_llama), str(tmp_path / "in.jsonl"), str(tmp_path / output), *OPTIONS, *arguments]
        )

    return run


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ids of the requests that engines have got."""
    ids: list[str] = []
    submit = LLMEngine.submit

    def count(self: LLMEngine, request: RequestState, **options: Any) -> None:
        submit(self, request, **options)
        ids.append(request.request_id)

    monkeypatch.setattr(LLMEngine, "submit", count)
    return ids


def mixed_lines() -> list[Any]:
    return [
        completion("greedy", temperature=0),
        completion("drawn", temperature=1.5),
        completion("drawn too", temperature=1.5),
        completion("seeded", temperature=1.5, seed=7),
        completion("several", ["hello", "wörld", "hello"], n=2, temperature=1.5, logprobs=2),
        completion("scored", echo=True, max_tokens=0, logprobs=1),
        chat("conversation", temperature=1.5),
        *(completion(f"long {number}", "once upon a time " * number, temperature=1.0) for number in range(1, 9)),
    ]


def test_answers(batch: Run, tmp_path: Path, capsys: Capture, submitted: list[str]) -> None:
    write_lines(tmp_path / "in.jsonl", mixed_lines())
    assert batch() == 0
    out = capsys.readouterr().out
    assert out.startswith("15 lines: 15 answered; ") and " tokens/s)" in out
    assert len(submitted) == 17  # one for each prompt
    assert not (tmp_path / "out.errors.jsonl").exists()
    for record in read_records(tmp_path / "out.jsonl"):
        assert set(record) == {"id", "custom_id", "response", "error"} and record["error"] is None
        assert record["id"].startswith("batch_req_")
        assert set(record["response"]) == {"status_code", "request_id", "body"}
        assert record["response"]["status_code"] == 200
        assert record["response"]["body"]["model"] == "tiny"
    by_id = answers(tmp_path / "out.jsonl")
    texts = {name: [one.get("text") for one in record["response"]["body"]["choices"]] for name, record in by_id.items()}
    assert texts["drawn"] != texts["drawn too"] != texts["seeded"]
    # Prompts of one line have seeds of their own, as they have when the server draws them.
    assert len(texts["several"]) == 6 and len(set(texts["several"])) == 6
    assert by_id["conversation"]["response"]["body"]["choices"][0]["message"]["role"] == "assistant"


def test_answers_depend_on_nothing_else(batch: Run, tmp_path: Path) -> None:
    lines = mixed_lines()
    expected = None
    for order, slots in (("grouped", "4"), ("input", "1"), ("longest", "7"), ("prefix", "2")):
        write_lines(tmp_path / "in.jsonl", lines)
        assert batch("--order", order, "--max-num-seqs", slots, output=f"{order}.jsonl") == (1 if slots == "1" else 0)
        found = answers(tmp_path / f"{order}.jsonl")
        found.pop("several", None)  # two samples do not fit one slot
        assert expected in (None, found)
        expected = found
        lines.reverse()
    write_lines(tmp_path / "in.jsonl", lines)
    assert batch("--seed", "1", output="seed.jsonl") == 0

    def texts(found: dict[str, Any], name: str) -> list[str]:
        return [one["text"] for one in found[name]["response"]["body"]["choices"]]

    other = answers(tmp_path / "seed.jsonl")
    assert expected is not None and texts(other, "drawn") != texts(expected, "drawn")
    for name in ("greedy", "seeded"):
        assert texts(other, name) == texts(expected, name)


def test_bad_lines_stop_nothing(batch: Run, tmp_path: Path, capsys: Capture) -> None:
    lines = [
        completion("a"),
        "nonsense",
        completion("b", model="another"),
        completion("c", "x" * 600),
        completion("d", temperature=-1),
        completion("e", n=5),
        completion("f", ["x"] * 65),
        chat("g", max_tokens=None, min_tokens=10**6),
        completion("h", stop_token_ids=[300]),
        completion("i", model="tiny"),
    ]
    write_lines(tmp_path / "in.jsonl", lines)
    assert batch() == 1
    assert "10 lines: 2 answered; 8 could not be, see " in capsys.readouterr().out
    assert set(answers(tmp_path / "out.jsonl")) == {"a", "i"}
    errors = {error["line"]: error for error in read_records(tmp_path / "out.errors.jsonl")}
    described = {
        line: (error["custom_id"], error["response"]["status_code"], error["response"]["body"]["error"]["param"])
        for line, error in errors.items()
    }
    assert described == {
        2: (None, 400, None),
        3: ("b", 404, "model"),
        4: ("c", 400, "prompt"),
        5: ("d", 400, "temperature"),
        6: ("e", 400, "n"),
        7: ("f", 400, "n"),
        8: ("g", 400, "min_tokens"),
        9: ("h", 400, "stop_token_ids"),
    }
    assert "max_model_len=512" in errors[4]["error"]["message"]
    assert errors[4]["error"]["code"] == "context_length_exceeded"
    assert all(error["file"] == str(tmp_path / "in.jsonl") for error in errors.values())


def test_what_the_engine_refuses(batch: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a line with several prompts, those that are in the engine already are taken out."""
    submit = LLMEngine.submit

    def refuse(self: LLMEngine, request: RequestState, **options: Any) -> None:
        if request.prompt_token_ids[-1] == request.prompt_token_ids[-2]:
            raise RequestTooLongError("the prompt has too many tokens")
        submit(self, request, **options)

    aborted: list[str] = []
    monkeypatch.setattr(LLMEngine, "submit", refuse)
    monkeypatch.setattr(LLMEngine, "abort_request", lambda self, ids: aborted.extend(ids))
    lines = [completion("a", ["hello", "hallo", "xx"]), *(completion(str(number)) for number in range(9))]
    write_lines(tmp_path / "in.jsonl", lines)
    assert batch() == 1
    assert set(answers(tmp_path / "out.jsonl")) == set("012345678")
    [error] = read_records(tmp_path / "out.errors.jsonl")
    assert (error["custom_id"], error["error"]["code"]) == ("a", "context_length_exceeded")
    assert error["response"]["body"]["error"]["param"] == "prompt"
    assert aborted == ["0/0", "0/1"]


def test_resumed_runs_repeat_nothing(batch: Run, tmp_path: Path, capsys: Capture, submitted: list[str]) -> None:
    lines = [completion(f"line {number}", temperature=1.0) for number in range(20)]
    write_lines(tmp_path / "in.jsonl", [*lines, "nonsense", completion("long", "x" * 600)])
    assert batch(output="undisturbed.jsonl") == 1
    assert batch() == 1
    whole, errors = (tmp_path / "out.jsonl").read_bytes(), (tmp_path / "out.errors.jsonl").read_bytes()
    kept = whole.splitlines(keepends=True)[:7]
    (tmp_path / "out.jsonl").write_bytes(b"".join(kept) + whole.splitlines()[7][:40])
    submitted.clear()
    capsys.readouterr()
    assert batch() == 1
    assert "22 lines: 20 answered, 7 of them before; 2 could not be, see " in capsys.readouterr().out
    assert len(submitted) == 13
    assert (tmp_path / "out.jsonl").read_bytes().startswith(b"".join(kept))
    assert answers(tmp_path / "out.jsonl") == answers(tmp_path / "undisturbed.jsonl")
    assert (tmp_path / "out.errors.jsonl").read_bytes() == errors
    whole = (tmp_path / "out.jsonl").read_bytes()
    submitted.clear()
    assert batch() == 1
    assert submitted == [] and (tmp_path / "out.jsonl").read_bytes() == whole


def test_nothing_left_needs_no_model(
    batch: Run, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lines(tmp_path / "in.jsonl", [completion("a")])
    assert batch() == 0
    monkeypatch.setattr("steploop.batch.run.LLMEngine", None)
    capsys.readouterr()
    assert batch() == 0
    assert capsys.readouterr().out == "1 lines: 1 answered, 1 of them before\n"


def test_few_requests_are_in_the_engine(packed_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    most = [0, 0]
    prepared = set()
    prepare, step = LLMEngine.prepare_request, LLMEngine.step

    def note(self: LLMEngine, request_id: str, *rest: Any, **options: Any) -> RequestState:
        prepared.add(request_id)
        return prepare(self, request_id, *rest, **options)

    def watch(self: LLMEngine) -> Any:
        outputs = step(self)
        most[0] = max(most[0], len(self.unfinished_request_ids()))
        prepared.difference_update(output.request_id for output in outputs if output.finished)
        most[1] = max(most[1], len(prepared))
        return outputs

    monkeypatch.setattr(LLMEngine, "prepare_request", note)
    monkeypatch.setattr(LLMEngine, "step", watch)
    write_lines(tmp_path / "in.jsonl", [completion(str(number)) for number in range(300)])
    summary = run_batch(packed_llama, tmp_path / "in.jsonl", tmp_path / "out.jsonl", max_num_seqs=4, num_threads=1)
    assert summary.num_answered == 300
    assert 4 < most[0] <= 4 * QUEUE_FACTOR
    assert most[1] <= 4 * (QUEUE_FACTOR + 1) + 1


def test_python_interface(packed_llama: Path, tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", [completion("a", model="mine"), completion("b", model=str(packed_llama))])
    settings: dict[str, Any] = {"max_num_seqs": 4, "num_threads": 1, "served_model_name": "mine"}
    settings |= {"max_num_queued_requests": 1, "max_num_queued_tokens": 1}
    files = (tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    summary = run_batch(packed_llama, *files, errors_path=tmp_path / "errors", **settings)
    assert (summary.num_lines, summary.num_before, summary.num_answered, summary.num_errors) == (2, 0, 2, 0)
    assert summary.num_prompt_tokens == 12 and summary.num_output_tokens == 12 and summary.duration > 0
    assert [record["response"]["body"]["model"] for record in read_records(files[1])] == ["mine", "mine"]
    for name, value in (("order", "random"), ("max_choices", 0), ("seed", -1), ("max_num_seqs", 0)):
        with pytest.raises(InvalidArgumentError, match=name):
            run_batch(packed_llama, *files, **{**settings, name: value})


def test_progress(packed_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the work is counted once, whether a line is answered, ends early or fails."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    done: list[tuple[int, int]] = []
    update = RequestProgress.update

    def count(self: RequestProgress, *, num_finished: int, num_tokens: int, amount: int) -> None:
        done.append((num_finished, amount))
        update(self, num_finished=num_finished, num_tokens=num_tokens, amount=amount)

    monkeypatch.setattr(RequestProgress, "update", count)
    several = completion("several", ["hello", "hallo"], n=2)
    lines = [*(completion(str(number)) for number in range(9)), several, completion("long", "x" * 600)]
    write_lines(tmp_path / "in.jsonl", [*lines, completion("ends", stop=["a", "e", "i", "o", "u"], max_tokens=300)])
    run_batch(packed_llama, tmp_path / "in.jsonl", tmp_path / "out.jsonl", max_num_seqs=4, num_threads=1)
    assert tuple(map(sum, zip(*done, strict=True))) == (12, 9 * 6 + 4 * 6 + (6 + 600 // 32) + 300)
    assert len(done) > 50 and all(amount >= 0 for _, amount in done)
    assert "Answering" in screen.getvalue() and "12/12" in screen.getvalue() and "tokens/s" in screen.getvalue()


def test_another_process_has_the_output(batch: Run, tmp_path: Path, capsys: Capture) -> None:
    from steploop.batch.record_file import RecordFile

    write_lines(tmp_path / "in.jsonl", [completion("a")])
    with RecordFile(tmp_path / "out.jsonl"):
        assert batch() == 1
    assert "out.jsonl is being written by another process" in capsys.readouterr().err
    with RecordFile(tmp_path / "out.errors.jsonl"):
        assert batch() == 1
    assert "out.errors.jsonl is being written by another process" in capsys.readouterr().err
    assert batch() == 0


def test_without_its_package(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("steploop.batch.", "steploop.openai."))]:
        if name != "steploop.batch.arguments":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pydantic", None)
    assert main(["batch", "model", str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl")]) == 1
    assert "pip install 'steploop[batch]'" in capsys.readouterr().err


def test_needs_no_server(packed_llama: Path, tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", [completion("a")])
    program = (
        "import sys; sys.modules['fastapi'] = sys.modules['starlette'] = sys.modules['uvicorn'] = None\n"
        "from steploop.cli import main; code = main(sys.argv[1:])\n"
        "assert 'transformers' not in sys.modules and 'torch' not in sys.modules; sys.exit(code)"
    )
    files = [str(tmp_path / name) for name in ("in.jsonl", "out.jsonl")]
    command = [sys.executable, "-c", program, "batch", str(packed_llama), *files, *OPTIONS]
    assert subprocess.run(command, capture_output=True, text=True, timeout=120).stderr == ""
    assert set(answers(tmp_path / "out.jsonl")) == {"a"}


def test_ctrl_c(packed_llama: Path, tmp_path: Path) -> None:
    lines = [completion(str(number), max_tokens=100) for number in range(400)]
    write_lines(tmp_path / "in.jsonl", lines)
    files = [str(tmp_path / name) for name in ("in.jsonl", "out.jsonl")]
    command = [sys.executable, "-m", "steploop", "batch", str(packed_llama), *files, *OPTIONS]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while process.poll() is None:
        if (tmp_path / "out.jsonl").exists() and (tmp_path / "out.jsonl").stat().st_size:
            break
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    num_done = len(read_records(tmp_path / "out.jsonl"))
    assert 0 < num_done < 400
    assert err == f"steploop: interrupted: {400 - num_done} of 400 lines are left; the same command goes on with them\n"


def test_tool_calls_have_the_same_ids(tiny_llama: Path, tmp_path: Path) -> None:
    parameters = {"type": "object", "properties": {"x": {"enum": [1]}}, "required": ["x"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    choice = {"type": "function", "function": {"name": "f"}}
    body = {"tools": tools, "tool_choice": choice, "max_tokens": 40, "ignore_eos": False, "n": 2}
    write_lines(tmp_path / "in.jsonl", [chat("a", **body), chat("b", **body)])
    calls = []
    for name in ("one.jsonl", "two.jsonl"):
        run_batch(tiny_llama, tmp_path / "in.jsonl", tmp_path / name, max_num_seqs=4, num_threads=1)
        calls.append(
            {
                custom_id: [one["message"]["tool_calls"][0] for one in record["response"]["body"]["choices"]]
                for custom_id, record in answers(tmp_path / name).items()
            }
        )
    assert calls[0] == calls[1]
    assert json.loads(calls[0]["a"][0]["function"]["arguments"]) == {"x": 1}
    ids = [call["id"] for some in calls[0].values() for call in some]
    assert len(set(ids)) == 4 and all(one.startswith("call_") for one in ids)
