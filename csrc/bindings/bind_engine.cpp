// Engine and StepOutput.
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

// A step's outcome for one request, as plain Python values that outlive the step.
struct PyStepOutput {
  py::str request_id;
  py::list token_ids;
  py::list logprobs;
  py::list top_logprobs;
  bool finished = false;
  py::object finish_reason = py::none();
  py::object stop_token_id = py::none();
  int32_t num_preemptions = 0;
  double arrival_time = 0;
  double first_scheduled_time = 0;
  double first_token_time = 0;
  double last_token_time = 0;
};

double seconds(int64_t us) {
  return us < 0 ? std::numeric_limits<double>::quiet_NaN() : static_cast<double>(us) * 1e-6;
}

PyStepOutput to_python(const StepOutput& output) {
  PyStepOutput out;
  const Request& request = *output.request;
  out.request_id = py::str(request.id);
  if (output.has_token) {
    out.token_ids.append(output.token);
    if (request.params.logprobs >= 0) out.logprobs.append(output.sample->logprob);
    if (request.params.logprobs >= 1) {
      py::list top;
      for (int32_t i = 0; i < output.sample->num_top; ++i)
        top.append(py::make_tuple(output.sample->top[i].token, output.sample->top[i].logprob));
      out.top_logprobs.append(top);
    }
  }
  out.finished = output.finish_reason != FinishReason::kNone;
  if (out.finished) out.finish_reason = py::str(finish_reason_name(output.finish_reason));
  if (output.stop_token >= 0) out.stop_token_id = py::int_(output.stop_token);
  out.num_preemptions = output.num_preemptions;
  out.arrival_time = seconds(request.arrival_us);
  out.first_scheduled_time = seconds(output.first_scheduled_us);
  out.first_token_time = seconds(output.first_token_us);
  out.last_token_time = seconds(output.last_token_us);
  return out;
}

py::dict phases(const PhaseDurations& durations) {
  return py::dict("schedule_us"_a = durations.schedule_us, "build_us"_a = durations.build_us,
                  "forward_us"_a = durations.forward_us, "sample_us"_a = durations.sample_us,
                  "update_us"_a = durations.update_us);
}

py::dict stats_of(const Engine& engine) {
  const EngineStats stats = engine.stats();
  const SchedulerStats& s = stats.scheduler;
  py::dict last = phases(stats.last);
  last["num_sequences"] = stats.last_num_sequences;
  last["num_prompt_tokens"] = stats.last_num_prompt_tokens;
  last["num_decode_tokens"] = stats.last_num_decode_tokens;
  return py::dict("num_waiting"_a = s.num_waiting + stats.num_queued, "num_running"_a = s.num_running,
                  "num_preempted"_a = s.num_preempted, "num_finished"_a = s.num_finished,
                  "num_aborted"_a = s.num_aborted, "num_preemptions"_a = s.num_preemptions,
                  "num_recomputed_tokens"_a = s.num_recomputed_tokens, "num_kv_blocks"_a = s.num_kv_blocks,
                  "num_used_kv_blocks"_a = s.num_used_kv_blocks, "num_kv_tokens"_a = s.num_kv_tokens,
                  "block_size"_a = engine.config().block_size, "num_steps"_a = s.num_steps, "last_step"_a = last,
                  "total"_a = phases(stats.total), "batch_invariant"_a = engine.config().matmul == nullptr,
                  "num_threads"_a = engine.num_threads(), "isa"_a = engine.isa());
}

std::shared_ptr<Engine> make_engine(std::shared_ptr<Model> model, int32_t max_model_len, int32_t max_num_seqs,
                                    int32_t max_num_batched_tokens, int32_t block_size, int32_t num_kv_blocks,
                                    const std::string& kv_cache_dtype, int32_t num_threads, uint64_t seed,
                                    const std::string& scheduling_policy, std::vector<TokenId> eos_token_ids,
                                    uintptr_t matmul) {
  if (!model->finished()) throw InvalidArgumentError("the model is not loaded: call finish_loading first");
  EngineConfig config;
  config.max_model_len = max_model_len;
  config.max_num_seqs = max_num_seqs;
  config.max_num_batched_tokens = max_num_batched_tokens;
  config.block_size = block_size;
  config.num_kv_blocks = num_kv_blocks;
  config.kv_dtype = dtype_from_name(kv_cache_dtype.c_str());
  config.num_threads = num_threads;
  config.matmul = reinterpret_cast<MatmulFunction>(matmul);
  config.seed = seed;
  config.policy = scheduling_policy_from_name(scheduling_policy.c_str());
  config.eos_token_ids = std::move(eos_token_ids);
  return std::make_shared<Engine>(std::move(model), config);
}

int64_t activation_bytes(const ModelConfig& model, const std::string& dtype, const std::string& kv_cache_dtype,
                         const std::string& device, int32_t max_model_len, int32_t max_num_seqs,
                         int32_t max_num_batched_tokens, int32_t block_size, bool batch_invariant) {
  EngineConfig config;
  config.max_model_len = max_model_len;
  config.max_num_seqs = max_num_seqs;
  config.max_num_batched_tokens = max_num_batched_tokens;
  config.block_size = block_size;
  config.kv_dtype = dtype_from_name(kv_cache_dtype.c_str());
  if (!batch_invariant) config.matmul = [](auto...) { return ""; };  // it counts that there is one
  return Engine::activation_bytes(model, dtype_from_name(dtype.c_str()), device_from_name(device.c_str()), config);
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

void bind_step_output(py::module_& m) {
  py::class_<PyStepOutput>(
      m, "StepOutput", "What one step did for one request. Times are seconds on time.monotonic's clock, nan: not yet.")
      .def_readonly("request_id", &PyStepOutput::request_id)
      .def_readonly("token_ids", &PyStepOutput::token_ids, "New token ids.")
      .def_readonly("logprobs", &PyStepOutput::logprobs, "Of the new tokens; empty unless asked for.")
      .def_readonly("top_logprobs", &PyStepOutput::top_logprobs,
                    "Per new token, (token id, log-probability) of the most likely; empty unless logprobs >= 1.")
      .def_readonly("finished", &PyStepOutput::finished)
      .def_readonly("finish_reason", &PyStepOutput::finish_reason, "None, 'stop', 'length', 'abort' or 'error'.")
      .def_readonly("stop_token_id", &PyStepOutput::stop_token_id, "Of the request's own stop_token_ids, or None.")
      .def_readonly("num_preemptions", &PyStepOutput::num_preemptions)
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
      .def(
          py::init(&make_engine), "model"_a.none(false), py::kw_only(), "max_model_len"_a, "max_num_seqs"_a = 64,
          "max_num_batched_tokens"_a = 2048, "block_size"_a = 16, "num_kv_blocks"_a, "kv_cache_dtype"_a,
          "num_threads"_a = 0, "seed"_a = 0, "scheduling_policy"_a = "on_demand",
          "eos_token_ids"_a = std::vector<TokenId>{}, "matmul"_a = 0,
          "Reserves all memory that steps will need (pages count once they are used). num_threads 0: the physical cores of the cpuset, within the CPU quota. "
          "matmul: on CUDA, the address of another library's function to use for linear layers, which gives up batch "
          "invariance (torch.ops.steploop_cuda.matmul_address()). "
          "Raises InvalidArgumentError, also when the pool is smaller than one sequence of max_model_len, or the device has "
          "too little memory.")
      .def_static(
          "activation_bytes", &activation_bytes, "config"_a, py::kw_only(), "dtype"_a, "kv_cache_dtype"_a, "device"_a,
          "max_model_len"_a, "max_num_seqs"_a, "max_num_batched_tokens"_a, "block_size"_a, "batch_invariant"_a,
          "Device memory that an engine takes beside weights and KV cache, in bytes; 0 on the CPU, where memory "
          "counts once it is used. Raises UnsupportedDeviceError and UnsupportedModelError for what the device cannot run.")
      .def_static(
          "kv_bytes_per_token",
          [](const ModelConfig& config, const std::string& kv_cache_dtype) {
            return config.kv_cache_spec(dtype_from_name(kv_cache_dtype.c_str())).bytes_per_token;
          },
          "config"_a, "kv_cache_dtype"_a, "Bytes of keys and values of one token over all layers.")
      .def(
          "add_request",
          [](Engine& engine, const py::str& request_id, std::vector<TokenId> token_ids, const SamplingParams& params,
             std::optional<double> arrival_time) {
            std::optional<int64_t> arrival_us;
            if (arrival_time) {
              if (!(*arrival_time >= 0 && *arrival_time < 1e12))
                throw InvalidRequestError(concat("arrival_time must be seconds >= 0, got ", *arrival_time));
              arrival_us = static_cast<int64_t>(*arrival_time * 1e6);
            }
            engine.add_request(std::string(request_id), std::move(token_ids), params, arrival_us);
          },
          "request_id"_a, "token_ids"_a, "params"_a, "arrival_time"_a = py::none(),
          "Any thread, also while step() runs. Raises InvalidRequestError, RequestTooLongError, DuplicateRequestError.")
      .def("abort_request", &Engine::abort_request, "request_id"_a,
           "Any thread. False if it is not in flight. The next step() reports it finished with 'abort'.")
      .def("step", &step, "One iteration, without the GIL. An output per request that got a token or ended.")
      .def(
          "cuda_stream", [](const Engine& engine) { return reinterpret_cast<uintptr_t>(engine.cuda_stream()); },
          "The cudaStream_t on which steps run, as an integer; 0 on the CPU.")
      .def("has_unfinished_requests", &Engine::has_unfinished_requests)
      .def("num_unfinished_requests", &Engine::num_unfinished_requests)
      .def("stats", &stats_of,
           "Counts as of the last step, and durations in microseconds. On CUDA the forward pass is only enqueued in "
           "forward_us; sample_us has the wait for all of it.")
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
          "Logits after each token of one sequence, float32 [tokens, vocab_size], by the kernels and cache that requests "
          "use. Raises InvalidRequestError while requests are in flight.")
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
          "Test aid: the last step's logits, float32 [sampled rows, vocab_size], in order of arrival.");
}

}  // namespace steploop
