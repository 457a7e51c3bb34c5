// The sampling kernel against the CPU sampler: the same token, the same failure, the logits as they were.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "check.h"
#include "cuda_emulation.h"
#include "sample/sampler.h"

namespace steploop::cuda {
namespace {

constexpr int kInvalidValue = 1;  // cudaErrorInvalidValue
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

struct Row {
  std::vector<float> logits;
  double temperature = 1;
  int32_t top_k = 0;
  double top_p = 1;
  uint64_t seed = 1;
  std::vector<TokenId> masked;
  bool want_logprob = true;
};

// The params as the engine gives them to the kernel.
SampleRowParams device_params(const Row& row, int32_t index, std::vector<TokenId>& masked_tokens) {
  SampleRowParams params;
  params.seed = row.seed;
  params.position = 10 + index;
  params.top_p = row.top_p;
  params.scale = row.temperature < SamplingParams::kGreedyTemperature
                     ? 0
                     : std::max(static_cast<float>(1.0 / row.temperature), FLT_MIN);
  params.top_k = row.top_k;
  params.sample_index = index % 3;
  params.want_logprob = row.want_logprob;
  params.first_masked = static_cast<int32_t>(masked_tokens.size());
  params.num_masked = static_cast<int32_t>(row.masked.size());
  masked_tokens.insert(masked_tokens.end(), row.masked.begin(), row.masked.end());
  return params;
}

SampleResult cpu_sample(const Row& row, const SampleRowParams& device, SamplerScratch& scratch) {
  SamplingParams params;
  params.temperature = row.temperature;
  params.top_k = row.top_k;
  params.top_p = row.top_p;
  params.logprobs = row.want_logprob ? 0 : -1;
  SampleRow sample;
  sample.logits = row.logits.data();
  sample.params = &params;
  sample.seed = device.seed;
  sample.sample_index = device.sample_index;
  sample.position = device.position;
  sample.mask_stop_tokens = !row.masked.empty();
  sample.stop_token_ids = row.masked;
  SampleResult result;
  sample_row(sample, scratch, result);
  return result;
}

std::string describe(const Row& row) {
  return "vocabulary of " + std::to_string(row.logits.size()) + ", temperature " + std::to_string(row.temperature) +
         ", top_k " + std::to_string(row.top_k) + ", top_p " + std::to_string(row.top_p) + ", " +
         std::to_string(row.masked.size()) + " masked, seed " + std::to_string(row.seed);
}

// One launch over rows of one vocabulary; of every second row, from the last, if `some`.
Exact<SampledToken> run(Check& check, const std::vector<Row>& rows, bool some) {
  const auto num_rows = static_cast<int32_t>(rows.size());
  const auto vocab_size = static_cast<int32_t>(rows[0].logits.size());
  std::vector<float> values;
  std::vector<SampleRowParams> row_params;
  std::vector<TokenId> masked;
  for (int32_t i = 0; i < num_rows; ++i) {
    values.insert(values.end(), rows[i].logits.begin(), rows[i].logits.end());
    row_params.push_back(device_params(rows[i], i, masked));
  }
  std::vector<int32_t> some_rows;
  for (int32_t i = num_rows - 1; some && i >= 0; i -= 2) some_rows.push_back(i);
  Exact<float> logits(values);
  const Exact<SampleRowParams> params(row_params);
  const Exact<TokenId> masked_tokens(masked);
  const Exact<int32_t> row_indices(some_rows);
  const SampledToken untouched = {-7, -7, -7};
  Exact<SampledToken> out(std::vector<SampledToken>(num_rows, untouched));

  SampleBatchParams batch;
  batch.logits = logits.data();
  batch.rows = params.data();
  batch.row_indices = some ? row_indices.data() : nullptr;
  batch.masked_tokens = masked_tokens.data();
  batch.out = out.data();
  batch.num_rows = num_rows;
  batch.num_sampled = some ? static_cast<int32_t>(row_indices.size()) : num_rows;
  batch.vocab_size = vocab_size;
  check.success("launch", sample(batch, nullptr));
  check.equal_bits("the logits are as they were", logits.data(), values.data(), logits.bytes());

  SamplerScratch scratch(vocab_size);
  for (int32_t i = 0; i < num_rows; ++i) {
    if (some && (num_rows - 1 - i) % 2 != 0) {
      check.ok("a row that was not asked for is left alone", out[i].token == untouched.token);
      continue;
    }
    const SampleResult expected = cpu_sample(rows[i], params[i], scratch);
    const std::string what = describe(rows[i]);
    check.ok("failed or not, " + what, out[i].failed == expected.failed);
    const TokenId token = expected.failed ? -1 : expected.token;
    check.ok("token " + std::to_string(token) + ", " + what, out[i].token == token);
    if (expected.failed) continue;
    const float bound = 1e-5f * std::max(1.0f, std::fabs(expected.logprob));
    check.ok("log-probability " + std::to_string(expected.logprob) + ", " + what,
             std::fabs(out[i].logprob - expected.logprob) <= bound);
  }
  return out;
}

std::vector<float> normal_logits(Check& check, int32_t size, float spread) {
  std::vector<float> logits(size);
  for (float& logit : logits) {
    const float radius = std::sqrt(-2 * std::log(check.uniform(1e-6f, 1)));
    logit = spread * radius * std::cos(check.uniform(0, 6.2831853f));
  }
  return logits;
}

// Whole numbers: ties everywhere, both zeros among them.
std::vector<float> tied_logits(Check& check, int32_t size, float spread) {
  std::vector<float> logits = normal_logits(check, size, spread);
  for (float& logit : logits) logit = std::round(logit);
  return logits;
}

// One row for every way through the kernel: all that ThreadSanitizer, which is slow, has to see.
void check_every_way(Check& check) {
  const int32_t vocab_size = 2500;
  const auto spread_out = normal_logits(check, vocab_size, 4);
  const std::vector<float> equal(vocab_size, 3.25f);
  std::vector<float> broken = spread_out;
  broken[1] = kNaN;
  std::vector<float> zeros(vocab_size, -1);
  zeros[400] = -0.0f;  // no less than the zero after it
  zeros[1200] = 0.0f;
  std::vector<Row> rows = {
      {spread_out, 0, 0, 1, 1, {7}, true},      // greedy, masked
      {spread_out, 1.3, 0, 1, 2, {7, 8}, true},  // uncut
      {spread_out, 1, 5, 0.9, 3, {}, true},      // candidates gathered
      {equal, 1, 600, 0.9, 4, {}, true},         // candidates in the row
      {equal, 1, 0, 0.9, 5, {9}, false},        {broken, 1, 2, 1, 6, {0}, true}, {zeros, 0, 0, 1, 7, {}, false},
  };
  const Exact<SampledToken> out = run(check, rows, false);
  check.same_in_all_orders("every way", out.data(), out.bytes());
}

void check_settings(Check& check, int32_t vocab_size) {
  const auto spread_out = normal_logits(check, vocab_size, 4);
  const auto flat = normal_logits(check, vocab_size, 0.3f);
  const auto tied = tied_logits(check, vocab_size, 1.5f);
  const std::vector<float> equal(vocab_size, 3.25f);
  std::vector<float> holes = normal_logits(check, vocab_size, 2);
  for (int32_t i = 0; i + 1 < vocab_size; i += 3) holes[i] = -kInfinity;
  const std::vector<float>* const kinds[] = {&spread_out, &flat, &tied, &equal, &holes};

  std::vector<Row> rows;
  uint64_t seed = 1;
  const auto add = [&](double temperature, int32_t top_k, double top_p) {
    rows.push_back({*kinds[seed % 5], temperature, top_k, top_p, seed, {}, seed % 3 != 0});
    ++seed;
  };
  for (int kind = 0; kind < 5; ++kind) add(0, 0, 1);
  for (const double temperature : {0.1, 0.7, 1.0, 5.0, 1e-4, 1e30, 1e300}) {
    add(temperature, 0, 1);
    add(temperature, 5, 0.9);
    add(temperature, 0, 0.9);
  }
  for (const int32_t top_k : {1, 2, 5, vocab_size / 2, vocab_size - 1, vocab_size, vocab_size + 9})
    for (const double top_p : {1.0, 0.8}) add(1, std::max(top_k, 1), top_p);
  for (const double top_p : {0.999, 0.9, 0.5, 1e-9, 1e-300}) {
    add(1, 0, top_p);
    add(0.8, 40, top_p);
  }
  // Every kind with settings that take the long way.
  for (int kind = 0; kind < 5; ++kind) add(1.5, vocab_size - vocab_size / 3, 0.97);
  for (int kind = 0; kind < 5; ++kind) add(1, 0, 0.95);
  const Exact<SampledToken> out = run(check, rows, false);
  check.same_in_all_orders("settings", out.data(), out.bytes());
}

void check_failures_and_masks(Check& check, int32_t vocab_size) {
  std::vector<Row> rows;
  const auto add = [&](std::vector<float> logits, std::vector<TokenId> masked) {
    for (const double temperature : {0.0, 1.0})
      rows.push_back({logits, temperature, 0, 1, rows.size() + 1, masked, true});
    rows.push_back({logits, 0.9, 3, 0.9, rows.size() + 1, masked, true});
  };
  const auto logits = tied_logits(check, vocab_size, 2);
  const auto largest = static_cast<TokenId>(std::max_element(logits.begin(), logits.end()) - logits.begin());
  const TokenId last = vocab_size - 1;
  const std::vector<float> nothing(vocab_size, -kInfinity);
  const auto with = [](std::vector<float> row, TokenId token, float logit) {
    row[token] = logit;
    return row;
  };
  add(with(logits, last, kNaN), {});
  add(with(logits, last, -kNaN), {last});  // masked, but the row is broken
  add(with(logits, last / 2, kInfinity), {});
  add(with(logits, last / 2, kInfinity), {last / 2});
  add(nothing, {});
  add(with(nothing, last, -80), {});
  add(with(nothing, last, -80), {last});
  add(with(nothing, last, FLT_MAX), {});
  add(with(with(logits, 0, -FLT_MAX), last, FLT_MAX), {});
  add(with(logits, 0, -0.0f), {});
  add(logits, {largest});
  add(with(logits, largest, 60), {largest});  // what is left holds next to nothing of the row
  std::vector<TokenId> all;
  for (TokenId token = 0; token < std::min(vocab_size, kMaxMaskedTokens); ++token) all.push_back(token);
  add(logits, all);
  for (size_t i = 0; i < rows.size(); ++i) rows[i].want_logprob = i % 4 != 3;
  for (const bool some : {false, true}) {
    if (some && vocab_size != 7) break;
    const Exact<SampledToken> out = run(check, rows, some);
    check.same_in_all_orders("failures and masks", out.data(), out.bytes());
  }
}

// Frequencies of many seeds, within 5 standard deviations; seen from the model's numbers rather than the CPU sampler.
void check_distribution(Check& check) {
  const std::vector<float> logits = {1.5f, -1, 0.25f, 2, 2, -kInfinity, 0, -3, 1};
  // Draws do not depend on the order of threads; the runs that look at that make do with a few.
  const auto& settings = cuda_emulation::settings();
  const bool many = settings.order == cuda_emulation::Order::kForward && settings.eager_copies;
  double sum = 0;
  for (const float logit : logits) sum += std::exp(logit);
  for (const bool cut : {false, true}) {  // a cut that leaves out nothing but must draw by rank
    const int num_draws = !many ? 50 : cut ? 300 : 2000;
    std::vector<Row> rows;
    for (int i = 0; i < num_draws; ++i)
      rows.push_back({logits, 1, cut ? static_cast<int32_t>(logits.size()) - 1 : 0, 1, uint64_t(i), {}, false});
    const Exact<SampledToken> out = run(check, rows, false);
    std::vector<int> count(logits.size());
    for (const SampledToken& token : out) ++count[token.token];
    for (size_t token = 0; token < logits.size(); ++token) {
      const double share = std::exp(logits[token]) / sum;
      const double deviation = std::sqrt(num_draws * share * (1 - share));
      check.ok(std::to_string(count[token]) + " draws of token " + std::to_string(token),
               std::fabs(count[token] - num_draws * share) <= 5 * deviation);
    }
  }
}

// Tokens whose weights need only the lower half of a sum, one in each chunk of the row: seeds that draw one of them.
void check_faint_tokens(Check& check) {
  const int32_t vocab_size = 5000;
  Row row;
  row.logits.assign(vocab_size, -kInfinity);
  row.logits[3] = 0;
  for (int32_t token = 300; token < vocab_size; token += 256) row.logits[token] = -9.5f;
  std::vector<Row> rows;
  SamplerScratch scratch(vocab_size);
  std::vector<TokenId> none;
  for (row.seed = 1; rows.size() < 6; ++row.seed) {
    const auto index = static_cast<int32_t>(rows.size());
    if (cpu_sample(row, device_params(row, index, none), scratch).token != 3) rows.push_back(row);
  }
  const Exact<SampledToken> out = run(check, rows, false);
  check.same_in_all_orders("faint tokens", out.data(), out.bytes());
}

// As many chunks as there are bins.
void check_largest_vocabulary(Check& check) {
  Row row;
  row.logits.assign(kMaxSampleVocab, -20);
  row.logits[5] = 0;
  const Exact<SampledToken> out = run(check, {row}, false);
  check.same_in_all_orders("largest vocabulary", out.data(), out.bytes());
}

void check_arguments(Check& check) {
  SampleBatchParams batch;
  batch.vocab_size = 100;
  check.success("no rows are nothing to do", sample(batch, nullptr));
  for (const int32_t vocab_size : {0, -1, (1 << 19) + 1}) {
    batch.vocab_size = vocab_size;
    check.fails("a vocabulary too small or too large", sample(batch, nullptr), kInvalidValue);
  }
  batch.vocab_size = 100;
  batch.num_sampled = -1;
  check.fails("-1 rows", sample(batch, nullptr), kInvalidValue);
}

}  // namespace
}  // namespace steploop::cuda

void check_sample(Check& check) {
  using namespace steploop::cuda;
  check_every_way(check);
  check_arguments(check);
#ifdef __SANITIZE_THREAD__
  constexpr bool kRaceCheck = true;
#else
  constexpr bool kRaceCheck = false;
#endif
  if (kRaceCheck) return;
  for (const int32_t vocab_size : {1, 7, 64, 300, 1000, 5000}) {
    check_settings(check, vocab_size);
    check_failures_and_masks(check, vocab_size);
  }
  check_faint_tokens(check);
  check_largest_vocabulary(check);
  check_distribution(check);
}
