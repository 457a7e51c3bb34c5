"""What clients send: OpenAI's request bodies, with vLLM's further sampling parameters. Types are not converted."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, model_validator

_MAX_FIELDS = 256
MAX_BIASES = 1024
_Item = TypeVar("_Item")


class _FirstErrorOnly(FailFast):
    """Of a list's items: a body may have a million."""

    def __hash__(self) -> int:  # a type with it can be one of several
        return hash(type(self))


List = Annotated[list[_Item], _FirstErrorOnly()]


def _check_number_of_fields(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > _MAX_FIELDS:
        raise ValueError(f"it must have at most {_MAX_FIELDS} entries, got {len(value)}")
    return value


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    _few = model_validator(mode="before")(_check_number_of_fields)


class StreamOptions(BaseModel):
    """What a stream has besides text. Further options are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True)

    include_usage: bool = False


class JsonSchema(_Body):
    """OpenAI's wrapping of a JSON schema."""

    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(_Body):
    """The form of the output: text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(_Body):
    """As `steploop.StructuredOutputsParams`."""

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: List[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False


def _check_number_of_biases(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        raise ValueError(f"it must have at most {MAX_BIASES} entries, got {len(value)}")
    return value


class GenerationRequest(_Body):
    """What completions and chat completions have in common; see `steploop.SamplingParams`."""

    model: str | None = None
    n: int | None = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = 0.0
    frequency_penalty: float | None = 0.0
    logit_bias: Annotated[dict[str, float], BeforeValidator(_check_number_of_biases)] | None = None
    allowed_token_ids: List[int] | None = None
    bad_words: List[str] | None = None
    seed: int | None = None
    min_tokens: int | None = 0
    stop: str | List[str] | None = None
    stop_token_ids: List[int] | None = None
    include_stop_str_in_output: bool | None = False
    ignore_eos: bool | None = False
    skip_special_tokens: bool | None = True
    spaces_between_special_tokens: bool | None = True
    truncate_prompt_tokens: int | None = None
    structured_outputs: StructuredOutputs | None = None
    response_format: ResponseFormat | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    # Of the scheduler: see LLMEngine.add_request.
    priority: int = 0
    tenant: str | None = None
    cache_salt: str | None = None
    deadline_ms: float | None = None
    # For OpenAI's own models and accounting, of no effect here.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None


class CompletionRequest(GenerationRequest):
    """`POST /v1/completions`."""

    prompt: str | List[str] | List[int] | List[List[int]]
    max_tokens: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool | None = False
    best_of: int | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = True


class _SentBack(BaseModel):
    """What clients send back as they got it, and what they made of it: further fields are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True)

    _few = model_validator(mode="before")(_check_number_of_fields)


class FunctionCall(_SentBack):
    """A function that the model has called, with its arguments as JSON."""

    name: str
    arguments: str


class ToolCall(_SentBack):
    """One in an earlier answer."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class ContentPart(_SentBack):
    """A part of a message: only text can be read."""

    type: str
    text: str | None = None


class ChatMessage(_SentBack):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | List[ContentPart] | None = None
    name: str | None = None
    tool_calls: List[ToolCall] | None = None
    tool_call_id: str | None = None


class Function(_Body):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Body):
    """A tool: functions are the only kind."""

    type: Literal["function"] = "function"
    function: Function


class NamedFunction(_Body):
    """Which function to call."""

    name: str


class NamedToolChoice(_Body):
    """That the model must call one function."""

    type: Literal["function"] = "function"
    function: NamedFunction


class ChatCompletionRequest(GenerationRequest):
    """`POST /v1/chat/completions`."""

    messages: List[ChatMessage]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    tools: List[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeRequest(_Body):
    """`POST /tokenize`: a prompt, or the messages of a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: List[ChatMessage] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    tools: List[Tool] | None = None
    return_token_strs: bool = False


class DetokenizeRequest(_Body):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: List[int]
