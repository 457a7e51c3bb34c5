// Python: Engine and StepOutput.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <limits>

#include "bindings/bindings.h"
#include "core/errors.h"
#include "engine/engine.h"
#include "exec/cuda_backend.h"

namespace py = pybind11;
using py::literals::operator""_a;

namespace steploop {

namespace {

// A step's outcome for one sample, as plain Python values that outlive the step.
struct PyStepOutput {
  py::str request_id;
  int32_t index = 0;
  py::list token_ids;
  py::list logprobs;
  py::list ranks;
  py::list top_logprobs;
  py::object prompt_logprobs = py::none();
  bool finished = false;
  bool request_finished = false;
  py::object finish_reason = py::none();
  py::object stop_token_id = py::none();
  int32_t num_preemptions = 0;
  int32_t num_cached_tokens = 0;
  double arrival_time = 0;
  double first_scheduled_time = 0;
  double first_token_time = 0;
  double last_token_time = 0;
};

double seconds(int64_t us) {
  return us < 0 ? std::numeric_limits<double>::quiet_NaN() : static_cast<double>(us) * 1e-6;
}

py::list top_of(const SampleResult& result) {
  py::list top;
  for (int32_t i = 0; i < result.num_top; ++i) top.append(py::make_tuple(result.top[i].token, result.top[i].logprob));
  return top;
}

py::object rank_of(const SampleResult& result) { return result.rank ? py::object(py::int_(result.rank)) : py::none(); }

py::list prompt_logprobs_of(const Request& request) {
  py::list out;
  for (const SampleResult& score : request.prompt_scores)
    out.append(py::make_tuple(score.logprob, rank_of(score), top_of(score)));
  return out;
}

PyStepOutput to_python(const StepOutput& output) {
  PyStepOutput out;
  const Request& request = *output.request;
  out.request_id = py::str(request.id);
  out.index = output.index;
  if (output.has_token) {
    out.token_ids.append(output.token);
    if (request.params.logprobs >= 0) {
      out.logprobs.append(output.sample->logprob);
      out.ranks.append(rank_of(*output.sample));
    }
    if (request.params.logprobs >= 1) out.top_logprobs.append(top_of(*output.sample));
    if (output.brings_prompt_scores) out.prompt_logprobs = prompt_logprobs_of(request);
  }
  out.finished = output.finish_reason != FinishReason::kNone;
  out.request_finished = output.request_finished;
  if (out.finished) out.finish_reason = py::str(finish_reason_name(output.finish_reason));
  if (output.stop_token >= 0) out.stop_token_id = py::int_(output.stop_token);
  out.num_preemptions = output.num_preemptions;
  out.num_cached_tokens = output.num_cached_tokens;
  out.arrival_time = seconds(request.arrival_us);
  out.first_scheduled_time = seconds(output.first_scheduled_us);
  out.first_token_time = seconds(output.first_token_us);
  out.last_token_time = seconds(output.last_token_us);
  return out;
}

// Engine's keyword arguments, but those that have no default.
struct Setting {
  const char* name;
  void (*set)(EngineConfig&, const py::handle&);
};

template <auto kMember>
void set_field(auto& config, const py::handle& value) {
  auto& field = config.*kMember;
  field = value.cast<std::remove_reference_t<decltype(field)>>();
}

template <auto kMember>
void set_engine(EngineConfig& config, const py::handle& value) {
  set_field<kMember>(config, value);
}

template <auto kMember>
void set_scheduler(EngineConfig& config, const py::handle& value) {
  set_field<kMember>(config.scheduler, value);
}

template <auto kMember>
void set_blocks(EngineConfig& config, const py::handle& value) {
  set_field<kMember>(config.scheduler.blocks, value);
}

template <auto kMember, auto kFromName>
void set_name(EngineConfig& config, const py::handle& value) {
  config.scheduler.*kMember = kFromName(value.cast<std::string>().c_str());
}

void set_matmul(EngineConfig& config, const py::handle& value) {
  config.matmul = reinterpret_cast<MatmulFunction>(value.cast<uintptr_t>());
}

constexpr Setting kSettings[] = {
    {"max_num_seqs", set_scheduler<&SchedulerConfig::max_num_seqs>},
    {"max_num_batched_tokens", set_scheduler<&SchedulerConfig::max_num_batched_tokens>},
    {"block_size", set_blocks<&BlockManagerConfig::block_size>},
    {"num_host_blocks", set_blocks<&BlockManagerConfig::num_host_blocks>},
    {"enable_prefix_caching", set_blocks<&BlockManagerConfig::enable_prefix_caching>},
    {"scheduling_policy", set_name<&SchedulerConfig::policy, policy_from_name>},
    {"watermark", set_scheduler<&SchedulerConfig::watermark>},
    {"preemption_mode", set_name<&SchedulerConfig::preemption, preemption_mode_from_name>},
    {"queue_order", set_name<&SchedulerConfig::order, order_from_name>},
    {"max_bypass", set_scheduler<&SchedulerConfig::max_bypass>},
    {"enable_chunked_prefill", set_scheduler<&SchedulerConfig::enable_chunked_prefill>},
    {"long_prefill_token_threshold", set_scheduler<&SchedulerConfig::long_prefill_token_threshold>},
    {"prompt_sharing", set_name<&SchedulerConfig::prompt_sharing, prompt_sharing_from_name>},
    {"waiting_served_ratio", set_scheduler<&SchedulerConfig::waiting_served_ratio>},
    {"max_waiting_tokens", set_scheduler<&SchedulerConfig::max_waiting_tokens>},
    {"target_step_duration_us", set_scheduler<&SchedulerConfig::target_step_duration_us>},
    {"num_threads", set_engine<&EngineConfig::num_threads>},
    {"seed", set_engine<&EngineConfig::seed>},
    {"eos_token_ids", set_engine<&EngineConfig::eos_token_ids>},
    {"max_num_queued_requests", set_engine<&EngineConfig::max_num_queued_requests>},
    {"max_num_queued_tokens", set_engine<&EngineConfig::max_num_queued_tokens>},
    {"iteration_stats_capacity", set_engine<&EngineConfig::iteration_stats_capacity>},
    {"trace", set_engine<&EngineConfig::trace_path>},
    {"profile", set_engine<&EngineConfig::profile>},
    {"matmul", set_matmul},
};

void set(EngineConfig& config, const std::string& name, const py::handle& value) {
  for (const Setting& setting : kSettings) {
    if (name != setting.name) continue;
    try {
      return setting.set(config, value);
    } catch (const py::cast_error&) {
      throw py::type_error(concat(name, " cannot be ", std::string(py::repr(value))));
    }
  }
  throw py::type_error(concat("Engine() got an unexpected keyword argument '", name, "'"));
}

std::shared_ptr<Engine> make_engine(std::shared_ptr<Model> model, int32_t max_model_len, int32_t num_kv_blocks,
                                    const std::string& kv_cache_dtype, const py::kwargs& settings) {
  if (!model->finished()) throw InvalidArgumentError("the model is not loaded: call finish_loading first");
  EngineConfig config;
  config.scheduler.max_model_len = max_model_len;
  config.scheduler.blocks.num_blocks = num_kv_blocks;
  config.kv_dtype = kv_dtype_from_name(kv_cache_dtype.c_str());
  for (const auto& [name, value] : settings) set(config, name.cast<std::string>(), value);
  return std::make_shared<Engine>(std::move(model), config);
}

int64_t activation_bytes(const ModelConfig& model, const std::string& dtype, const std::string& kv_cache_dtype,
                         const std::string& device, int32_t max_model_len, int32_t max_num_seqs,
                         int32_t max_num_batched_tokens, int32_t block_size, bool batch_invariant) {
  EngineConfig config;
  config.scheduler.max_model_len = max_model_len;
  config.scheduler.max_num_seqs = max_num_seqs;
  config.scheduler.max_num_batched_tokens = max_num_batched_tokens;
  config.scheduler.blocks.block_size = block_size;
  config.kv_dtype = kv_dtype_from_name(kv_cache_dtype.c_str());
  if (!batch_invariant) config.matmul = [](auto...) { return ""; };  // it counts that there is one
  return Engine::activation_bytes(model, dtype_from_name(dtype.c_str()), device_from_name(device.c_str()), config);
}

void add_request(Engine& engine, const py::str& request_id, std::vector<TokenId> token_ids,
                 const SamplingParams& params, std::optional<double> arrival_time, int32_t priority,
                 std::optional<std::string> tenant, std::optional<std::string> cache_salt,
                 std::optional<double> deadline_ms, std::optional<std::shared_ptr<TokenBitmask>> token_bitmask) {
  RequestOptions options;
  options.priority = priority;
  options.tenant = std::move(tenant);
  options.cache_salt = std::move(cache_salt);
  options.deadline_ms = deadline_ms;
  if (token_bitmask) options.token_bitmask = std::move(*token_bitmask);
  if (arrival_time) {
    if (!(*arrival_time >= 0 && *arrival_time < 1e12))
      throw InvalidRequestError(concat("arrival_time must be seconds >= 0, got ", *arrival_time));
    options.arrival_us = static_cast<int64_t>(*arrival_time * 1e6);
  }
  engine.add_request(std::string(request_id), std::move(token_ids), params, std::move(options));
}

py::list step(Engine& engine) {
  py::list out;
  const py::gil_scoped_release release;
  engine.step([&out](std::span<const StepOutput> outputs) {
    const py::gil_scoped_acquire acquire;
    for (const StepOutput& output : outputs) out.append(to_python(output));
  });
  return out;
}

constexpr const char* kEngineDoc =
    "Reserves all memory that steps will need (pages count once they are used). Further keyword arguments, with their "
    "defaults:\n\n"
    "max_num_seqs 64, max_num_batched_tokens 2048: sequences that run at a time, and tokens of a step\n"
    "block_size 16: tokens of a KV block: 8, 16, 32 or 64\n"
    "num_host_blocks 0: blocks of the host pool, for preemption_mode 'swap' and 'auto'\n"
    "enable_prefix_caching True\n"
    "scheduling_policy 'on_demand': or 'reserve', 'estimate', 'static'\n"
    "watermark 0.0: share of the KV blocks kept free on admission, in [0, 1)\n"
    "preemption_mode 'recompute': or 'swap', 'auto'\n"
    "queue_order 'fcfs': or 'priority', 'shortest_first', 'longest_prefix', 'fair'\n"
    "max_bypass 8: so often may others start before the longest-waiting request\n"
    "enable_chunked_prefill True; without it waiting_served_ratio 0.3 and max_waiting_tokens 20 (decode steps) say "
    "when prompts interrupt decodes\n"
    "long_prefill_token_threshold 0: a prompt's most tokens in a step; 0: no limit\n"
    "prompt_sharing 'in_order': or 'equal_progress'\n"
    "target_step_duration_us 0: prompts get so many tokens that a step takes no longer; 0: no target\n"
    "num_threads 0: the physical cores of the cpuset, within the CPU quota\n"
    "seed 0: of requests that bring none\n"
    "eos_token_ids []\n"
    "max_num_queued_requests 0, max_num_queued_tokens 0: what may wait to start; 0: no limit\n"
    "iteration_stats_capacity 1024: iterations that iteration_stats() remembers\n"
    "trace '': path of a file to write a Chrome trace to\n"
    "profile False: whether operations are measured, for profile(); CPU only\n"
    "matmul 0: on CUDA, the address of another library's function to use for linear layers, which gives up batch "
    "invariance (torch.ops.steploop_cuda.matmul_address())\n\n"
    "Raises InvalidArgumentError, also when the pool is smaller than one sequence of max_model_len, the device has too "
    "little memory, or the trace cannot be opened.";

void bind_step_output(py::module_& m) {
  py::class_<PyStepOutput>(
      m, "StepOutput",
      "What one step did for one sample of a request. Times are seconds on time.monotonic's clock, nan: not yet.")
      .def_readonly("request_id", &PyStepOutput::request_id)
      .def_readonly("index", &PyStepOutput::index, "Of the sample, below SamplingParams.n.")
      .def_readonly("token_ids", &PyStepOutput::token_ids, "New token ids.")
      .def_readonly("logprobs", &PyStepOutput::logprobs, "Of the new tokens; empty unless asked for.")
      .def_readonly("ranks", &PyStepOutput::ranks,
                    "Of the new tokens, from 1, None where the device did not count; empty unless logprobs was set.")
      .def_readonly("prompt_logprobs", &PyStepOutput::prompt_logprobs,
                    "Once for a request that asked, with its first token: (log-probability, rank, most likely ones) of "
                    "each token of the prompt but the first. Else None.")
      .def_readonly("top_logprobs", &PyStepOutput::top_logprobs,
                    "Per new token, (token id, log-probability) of the most likely; empty unless logprobs >= 1.")
      .def_readonly("finished", &PyStepOutput::finished, "The sample has ended.")
      .def_readonly("request_finished", &PyStepOutput::request_finished, "All samples have; this is the last output.")
      .def_readonly("finish_reason", &PyStepOutput::finish_reason,
                    "None, 'stop', 'length', 'abort', 'timeout' or 'error'.")
      .def_readonly("stop_token_id", &PyStepOutput::stop_token_id, "Of the request's own stop_token_ids, or None.")
      .def_readonly("num_preemptions", &PyStepOutput::num_preemptions)
      .def_readonly("num_cached_tokens", &PyStepOutput::num_cached_tokens,
                    "Of the prompt, found in the prefix cache or computed for another sample when this one started.")
      .def_readonly("arrival_time", &PyStepOutput::arrival_time)
      .def_readonly("first_scheduled_time", &PyStepOutput::first_scheduled_time)
      .def_readonly("first_token_time", &PyStepOutput::first_token_time)
      .def_readonly("last_token_time", &PyStepOutput::last_token_time);
}

}  // namespace

void bind_engine(py::module_& m) {
  bind_step_output(m);
  m.def(
      "cuda_memory",
      [] {
        const CudaMemory memory = cuda_backend().memory();
        return py::make_tuple(memory.free_bytes, memory.total_bytes);
      },
      "(free, total) bytes of the CUDA device. Raises UnsupportedDeviceError.");
  py::class_<Engine, std::shared_ptr<Engine>>(m, "Engine", "The native batching loop over one model.")
      .def(py::init(&make_engine), "model"_a.none(false), py::kw_only(), "max_model_len"_a, "num_kv_blocks"_a,
           "kv_cache_dtype"_a, kEngineDoc)
      .def_static(
          "activation_bytes", &activation_bytes, "config"_a, py::kw_only(), "dtype"_a, "kv_cache_dtype"_a, "device"_a,
          "max_model_len"_a, "max_num_seqs"_a, "max_num_batched_tokens"_a, "block_size"_a, "batch_invariant"_a,
          "Device memory that an engine takes beside weights and KV cache, in bytes; 0 on the CPU, where memory "
          "counts once it is used. Raises UnsupportedDeviceError and UnsupportedModelError for what the device cannot "
          "run.")
      .def_static(
          "kv_bytes_per_token",
          [](const ModelConfig& config, const std::string& kv_cache_dtype) {
            return config.kv_cache_spec(kv_dtype_from_name(kv_cache_dtype.c_str())).bytes_per_token;
          },
          "config"_a, "kv_cache_dtype"_a, "Bytes of keys and values of one token over all layers.")
      .def(
          "add_request", &add_request, "request_id"_a, "token_ids"_a, "params"_a, "arrival_time"_a = py::none(),
          py::kw_only(), "priority"_a = 0, "tenant"_a = py::none(), "cache_salt"_a = py::none(),
          "deadline_ms"_a = py::none(), "token_bitmask"_a = py::none(),
          "Any thread, also while step() runs. arrival_time: seconds on time.monotonic's clock, default now. priority: "
          "the lower goes first with queue_order 'priority'. tenant: whose turn it takes with queue_order 'fair'. "
          "Cached prefixes are shared only among requests of one cache_salt; without, of one tenant; without either, "
          "among all such. deadline_ms: after arrival, from when on the request ends with 'timeout'. "
          "token_bitmask: which tokens may come next, a row for each sample; each step reads it, write between steps. "
          "Raises InvalidRequestError, RequestTooLongError, DuplicateRequestError, QueueFullError.")
      .def("abort_request", &Engine::abort_request, "request_id"_a, "index"_a = py::none(),
           "Any thread. False if it is not in flight. The next step() reports every unfinished sample finished with "
           "'abort'. index: only this sample.")
      .def("set_accepting", &Engine::set_accepting, "accepting"_a,
           "Any thread. While it does not accept, add_request raises QueueFullError.")
      .def("step", &step, "One iteration, without the GIL. An output per sample that got a token or ended.")
      .def(
          "cuda_stream", [](const Engine& engine) { return reinterpret_cast<uintptr_t>(engine.cuda_stream()); },
          "The cudaStream_t on which steps run, as an integer; 0 on the CPU.")
      .def("has_unfinished_requests", &Engine::has_unfinished_requests)
      .def("num_unfinished_requests", &Engine::num_unfinished_requests)
      .def("stats", &stats_of,
           "Counts as of the last step, and durations in microseconds. On CUDA the forward pass is only enqueued in "
           "forward_us; sample_us has the wait for all of it. trace_error: why tracing stopped, None if it did not.")
      .def("iteration_stats", &drain_iteration_stats,
           "What each iteration since the last call did, a dict each, oldest first; the oldest are dropped beyond "
           "iteration_stats_capacity. Latencies are milliseconds, phases microseconds, timestamp seconds on "
           "time.monotonic's clock when the iteration began. Requests are counted by sample, but num_queued_requests.")
      .def("profile", &take_profile,
           "What operations took since the last call, of an engine made with profile=True: num_runs, run_us and "
           "operations, by name a dict of num_calls, num_barriers and, for each thread, working_us and waiting_us (at "
           "barriers). Waits for a step in progress. Raises InvalidArgumentError without profile=True, "
           "EngineDeadError.")
      .def("reset_prefix_cache", &Engine::reset_prefix_cache, py::call_guard<py::gil_scoped_release>(),
           "Forgets every cached prefix, between steps. Raises EngineDeadError.")
      .def("close", &Engine::close, py::call_guard<py::gil_scoped_release>(), "Frees all memory. Idempotent.")
      .def_property_readonly("closed", &Engine::closed)
      .def_property_readonly("num_threads", &Engine::num_threads)
      .def_property_readonly("isa", &Engine::isa)
      .def(
          "teacher_forced_logits",
          [](Engine& engine, const std::vector<TokenId>& token_ids) {
            std::vector<float> logits;
            {
              const py::gil_scoped_release release;
              logits = engine.teacher_forced_logits(token_ids);
            }
            const auto rows = static_cast<py::ssize_t>(token_ids.size());
            return py::array_t<float>({rows, static_cast<py::ssize_t>(logits.size()) / rows}, logits.data());
          },
          "token_ids"_a,
          "Logits after each token of one sequence, float32 [tokens, vocab_size], by the kernels and cache that "
          "requests use. Raises InvalidRequestError while requests are in flight.")
      .def("check_integrity", &Engine::check_integrity, py::call_guard<py::gil_scoped_release>(),
           "Test aid: raises InternalError for a broken invariant.")
      .def("shuffle_free_blocks", &Engine::shuffle_free_blocks, "seed"_a, py::call_guard<py::gil_scoped_release>(),
           "Test aid: puts the free KV blocks in a random order, between steps.")
      .def(
          "last_logits",
          [](const Engine& engine) {
            std::vector<float> logits;
            {
              const py::gil_scoped_release release;
              logits = engine.last_logits();
            }
            const py::ssize_t vocab_size = engine.model_config().vocab_size;
            return py::array_t<float>({static_cast<py::ssize_t>(logits.size()) / vocab_size, vocab_size},
                                      logits.data());
          },
          "Test aid: the last step's logits, float32 [sampled rows, vocab_size], in the order of the step.");
}

}  // namespace steploop
