// Python: SamplingParams, and the sampler and its generator alone, for tests and studies.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <memory>
#include <utility>

#include "bindings/bindings.h"
#include "core/errors.h"
#include "sample/philox.h"
#include "sample/process_logits.h"
#include "sample/sampler.h"
#include "sample/token_bitmask.h"

namespace py = pybind11;

namespace steploop {
namespace {

// Types and widths are checked by the Python class of the same name, with better words than a failed conversion has.
SamplingParams make_params(int32_t n, double temperature, int32_t top_k, double top_p, double min_p,
                           double repetition_penalty, double presence_penalty, double frequency_penalty,
                           std::vector<std::pair<TokenId, float>> logit_bias, std::vector<TokenId> allowed_token_ids,
                           std::vector<std::vector<TokenId>> bad_words, std::optional<uint64_t> seed,
                           int32_t max_tokens, int32_t min_tokens, std::vector<TokenId> stop_token_ids, bool ignore_eos,
                           std::optional<int32_t> logprobs, std::optional<int32_t> prompt_logprobs) {
  // -1 stands for none in C++ only.
  const auto check = [](const char* name, const std::optional<int32_t>& count) {
    if (count && *count < 0)
      throw InvalidRequestError(concat(name, " must be in 0..", kMaxTopLogprobs, ", or None, got ", *count));
  };
  check("logprobs", logprobs);
  check("prompt_logprobs", prompt_logprobs);
  SamplingParams params = {.n = n,
                           .temperature = temperature,
                           .top_k = top_k,
                           .top_p = top_p,
                           .min_p = min_p,
                           .repetition_penalty = repetition_penalty,
                           .presence_penalty = presence_penalty,
                           .frequency_penalty = frequency_penalty,
                           .logit_bias = std::move(logit_bias),
                           .allowed_token_ids = std::move(allowed_token_ids),
                           .bad_words = std::move(bad_words),
                           .seed = seed,
                           .max_tokens = max_tokens,
                           .min_tokens = min_tokens,
                           .stop_token_ids = std::move(stop_token_ids),
                           .ignore_eos = ignore_eos,
                           .logprobs = logprobs.value_or(-1),
                           .prompt_logprobs = prompt_logprobs.value_or(-1)};
  params.validate();
  return params;
}

template <int32_t SamplingParams::* kField>
std::optional<int32_t> count_to_python(const SamplingParams& params) {
  return params.*kField < 0 ? std::nullopt : std::optional(params.*kField);
}

std::string params_repr(const SamplingParams& params) {
  auto text = [](const auto& value) { return std::string(py::repr(py::cast(value))); };
  return concat("SamplingParams(n=", params.n, ", temperature=", text(params.temperature), ", top_k=", params.top_k,
                ", top_p=", text(params.top_p), ", min_p=", text(params.min_p),
                ", repetition_penalty=", text(params.repetition_penalty),
                ", presence_penalty=", text(params.presence_penalty),
                ", frequency_penalty=", text(params.frequency_penalty), ", logit_bias=", text(params.logit_bias),
                ", allowed_token_ids=", text(params.allowed_token_ids), ", bad_words=", text(params.bad_words),
                ", seed=", text(params.seed), ", max_tokens=", params.max_tokens, ", min_tokens=", params.min_tokens,
                ", stop_token_ids=", text(params.stop_token_ids), ", ignore_eos=", text(params.ignore_eos),
                ", logprobs=", text(count_to_python<&SamplingParams::logprobs>(params)),
                ", prompt_logprobs=", text(count_to_python<&SamplingParams::prompt_logprobs>(params)), ")");
}

// No conversion: a copy would hide that the caller holds another dtype.
using FloatRow = py::array_t<float, py::array::c_style>;
using BitmaskRow = py::array_t<int32_t, py::array::c_style>;

// A row, and what it points to.
class OwnedRow {
 public:
  OwnedRow(const FloatRow& logits, const SamplingParams& params, const std::vector<TokenId>& masked_token_ids,
           const std::optional<BitmaskRow>& bitmask, const std::vector<TokenId>& prompt_token_ids,
           const std::vector<TokenId>& output_token_ids)
      : counts_(prompt_token_ids, static_cast<int64_t>(output_token_ids.size())) {
    if (logits.ndim() != 1 || logits.size() == 0)
      throw InvalidArgumentError(concat("logits must have 1 dimension and a token or more, got ", logits.ndim(),
                                        " dimensions and ", logits.size(), " tokens"));
    if (bitmask && (bitmask->ndim() != 1 || bitmask->size() != ceil_div(logits.size(), 32)))
      throw InvalidArgumentError(
          concat("bitmask must have ", ceil_div(logits.size(), 32), " words, got ", bitmask->size()));
    row.logits = logits.data();
    row.params = &params;
    row.mask_stop_tokens = !masked_token_ids.empty();
    row.stop_token_ids = masked_token_ids;
    if (bitmask) row.grammar_bitmask = reinterpret_cast<const uint32_t*>(bitmask->data());
    if (!params.allowed_token_ids.empty()) {
      allowed_ = make_bitmask(params.allowed_token_ids, static_cast<int32_t>(logits.size()));
      row.allowed_bitmask = allowed_.data();
    }
    row.output_tokens = output_token_ids;
    for (const TokenId token : output_token_ids) counts_.add_output(token);
    row.counts = &counts_;
  }

  SampleRow row;

 private:
  std::vector<uint32_t> allowed_;
  TokenCounts counts_;
};

py::tuple sample(const FloatRow& logits, const SamplingParams& params, uint64_t seed, int32_t sample_index,
                 int64_t position, const std::vector<TokenId>& masked_token_ids,
                 const std::optional<BitmaskRow>& bitmask, const std::vector<TokenId>& prompt_token_ids,
                 const std::vector<TokenId>& output_token_ids) {
  OwnedRow owned(logits, params, masked_token_ids, bitmask, prompt_token_ids, output_token_ids);
  owned.row.seed = seed;
  owned.row.sample_index = sample_index;
  owned.row.position = position;
  SamplerScratch scratch(static_cast<int32_t>(logits.size()));
  SampleResult result;
  sample_row(owned.row, scratch, result);
  py::list top;
  for (int32_t i = 0; i < result.num_top; ++i) top.append(py::make_tuple(result.top[i].token, result.top[i].logprob));
  return py::make_tuple(result.token, result.logprob, top, result.failed);
}

py::array_t<float> processed(const FloatRow& logits, const SamplingParams& params,
                             const std::vector<TokenId>& masked_token_ids, const std::optional<BitmaskRow>& bitmask,
                             const std::vector<TokenId>& prompt_token_ids,
                             const std::vector<TokenId>& output_token_ids) {
  const OwnedRow owned(logits, params, masked_token_ids, bitmask, prompt_token_ids, output_token_ids);
  py::array_t<float> out(logits.size());
  process_logits(owned.row, static_cast<int32_t>(logits.size()), out.mutable_data());
  return out;
}

void bind_token_bitmask(py::module_& m) {
  py::class_<TokenBitmask, std::shared_ptr<TokenBitmask>>(
      m, "TokenBitmask", py::buffer_protocol(),
      "Which tokens may come next in each sample of a request. A buffer of int32 [num_rows, ceil(vocab_size / 32)]: token "
      "i is bit i % 32 of word i / 32. At first all may. Raises InvalidArgumentError for sizes below 1.")
      .def(py::init<int32_t, int32_t>(), py::kw_only(), py::arg("num_rows"), py::arg("vocab_size"))
      .def_buffer([](TokenBitmask& bitmask) {
        const auto words = static_cast<py::ssize_t>(bitmask.words_per_row());
        return py::buffer_info(reinterpret_cast<int32_t*>(bitmask.words()), {py::ssize_t{bitmask.num_rows()}, words},
                               {words * py::ssize_t{sizeof(int32_t)}, py::ssize_t{sizeof(int32_t)}});
      });
}

}  // namespace

void bind_sampling(py::module_& m) {
  bind_token_bitmask(m);
  py::class_<SamplingParams>(
      m, "SamplingParams",
      "How the tokens of one request are chosen and when it ends. n: samples of its prompt. top_k 0 or -1 keeps all "
      "tokens, logprobs None gives none. Raises InvalidRequestError for a value out of its range.")
      .def(py::init(&make_params), py::kw_only(), py::arg("n") = 1, py::arg("temperature") = 1.0, py::arg("top_k") = 0,
           py::arg("top_p") = 1.0, py::arg("min_p") = 0.0, py::arg("repetition_penalty") = 1.0,
           py::arg("presence_penalty") = 0.0, py::arg("frequency_penalty") = 0.0,
           py::arg("logit_bias") = std::vector<std::pair<TokenId, float>>{},
           py::arg("allowed_token_ids") = std::vector<TokenId>{},
           py::arg("bad_words") = std::vector<std::vector<TokenId>>{}, py::arg("seed") = py::none(),
           py::arg("max_tokens") = 16, py::arg("min_tokens") = 0, py::arg("stop_token_ids") = std::vector<TokenId>{},
           py::arg("ignore_eos") = false, py::arg("logprobs") = py::none(), py::arg("prompt_logprobs") = py::none())
      .def_readonly("n", &SamplingParams::n)
      .def_readonly("temperature", &SamplingParams::temperature)
      .def_readonly("top_k", &SamplingParams::top_k)
      .def_readonly("top_p", &SamplingParams::top_p)
      .def_readonly("min_p", &SamplingParams::min_p)
      .def_readonly("repetition_penalty", &SamplingParams::repetition_penalty)
      .def_readonly("presence_penalty", &SamplingParams::presence_penalty)
      .def_readonly("frequency_penalty", &SamplingParams::frequency_penalty)
      .def_readonly("logit_bias", &SamplingParams::logit_bias)
      .def_readonly("allowed_token_ids", &SamplingParams::allowed_token_ids)
      .def_readonly("bad_words", &SamplingParams::bad_words)
      .def_readonly("seed", &SamplingParams::seed)
      .def_readonly("max_tokens", &SamplingParams::max_tokens)
      .def_readonly("min_tokens", &SamplingParams::min_tokens)
      .def_readonly("stop_token_ids", &SamplingParams::stop_token_ids)
      .def_readonly("ignore_eos", &SamplingParams::ignore_eos)
      .def_property_readonly("logprobs", &count_to_python<&SamplingParams::logprobs>)
      .def_property_readonly("prompt_logprobs", &count_to_python<&SamplingParams::prompt_logprobs>)
      .def("__repr__", &params_repr)
      .def("__eq__", [](const SamplingParams& a, const SamplingParams& b) { return a == b; }, py::is_operator());

  m.def("sample", &sample, py::arg("logits").noconvert(), py::arg("params"), py::kw_only(), py::arg("seed"),
        py::arg("sample_index") = 0, py::arg("position") = 0, py::arg("masked_token_ids") = std::vector<TokenId>{},
        py::arg("bitmask").noconvert() = py::none(), py::arg("prompt_token_ids") = std::vector<TokenId>{},
        py::arg("output_token_ids") = std::vector<TokenId>{},
        "Chooses one token from float32 logits [vocab]; bitmask: int32 [ceil(vocab / 32)], a set bit allows its token; "
        "the token ids before it count for penalties and bad_words. "
        "Returns (token, logprob, [(token, logprob), ...], failed).");
  m.def("process_logits", &processed, py::arg("logits").noconvert(), py::arg("params"), py::kw_only(),
        py::arg("masked_token_ids") = std::vector<TokenId>{}, py::arg("bitmask").noconvert() = py::none(),
        py::arg("prompt_token_ids") = std::vector<TokenId>{}, py::arg("output_token_ids") = std::vector<TokenId>{},
        "Logits [vocab] as `sample` goes on with them: after all that comes before temperature.");
  m.def(
      "philox4x32",
      [](const std::array<uint32_t, 4>& counter, const std::array<uint32_t, 2>& key) {
        const Philox4x32 out = philox4x32_10({{counter[0], counter[1], counter[2], counter[3]}}, key[0], key[1]);
        return std::array<uint32_t, 4>{out.word[0], out.word[1], out.word[2], out.word[3]};
      },
      py::arg("counter"), py::arg("key"), "Philox4x32-10: four 32-bit words of four counter and two key words.");
  m.def("uniform", &uniform, py::kw_only(), py::arg("seed"), py::arg("sample_index"), py::arg("position"),
        "The number in (0, 1) that the token at a position is drawn with.");
}

}  // namespace steploop
