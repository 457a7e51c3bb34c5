// The CPU sampler. Full sorts are avoided: only blocks whose maximum is high enough are searched for candidates, and of
// these only the buckets in which a cut or the draw falls are sorted.
#include "sample/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "sample/philox.h"
#include "sample/process_logits.h"
#include "sample/row_math.h"

namespace steploop {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// A weight of e^-32 of the largest is 1e-14: lost in the rounding of the others' sum.
constexpr float kMaxDistance = 32;

template <class T>
bool ranks_before(const T& a, const T& b) {
  return a.logit != b.logit ? a.logit > b.logit : a.token < b.token;
}

}  // namespace

SamplerScratch::SamplerScratch(int32_t vocab_size)
    : vocab_size_(vocab_size),
      logits_(std::make_unique_for_overwrite<float[]>(vocab_size)),
      block_max_(std::make_unique_for_overwrite<float[]>(num_row_blocks(vocab_size))),
      block_buffer_(std::make_unique_for_overwrite<float[]>(num_row_blocks(vocab_size))),
      block_sum_(std::make_unique_for_overwrite<double[]>(num_row_blocks(vocab_size))),
      candidates_(std::make_unique_for_overwrite<Candidate[]>(vocab_size)) {}

// What the model itself gave a row's tokens.
class RowLogprobs {
 public:
  // block_max: of scan_row, and stays what it was.
  RowLogprobs(const float* logits, SamplerScratch& scratch, float max)
      : scratch_(scratch),
        logits_(logits),
        size_(scratch.vocab_size()),
        log_sum_(max + std::log(exp_sum(logits, size_, max, 1.0f, scratch.block_sum_.get()))) {}

  void find(TokenId token, SampleResult& result) const {
    result.logprob = static_cast<float>(logits_[token] - log_sum_);
    result.rank = 1;
    for (int32_t i = 0; i < size_; ++i)
      result.rank += logits_[i] > logits_[token] || (logits_[i] == logits_[token] && i < token);
  }

  void find_top(int32_t count, SampleResult& result) const {
    result.num_top = 0;
    if (count == 0) return;
    const int32_t num_blocks = num_row_blocks(size_);
    const float lowest =
        lower_bound_of_largest(scratch_.block_max_.get(), num_blocks, count, scratch_.block_buffer_.get());
    SamplerScratch::Candidate* const begin = scratch_.candidates_.get();
    SamplerScratch::Candidate* end = begin;
    for (int32_t block = 0; block < num_blocks; ++block) {
      if (scratch_.block_max_[block] < lowest) continue;
      for (int32_t i = block * kRowBlock; i < std::min(size_, (block + 1) * kRowBlock); ++i)
        if (logits_[i] >= lowest && logits_[i] != -kInfinity) *end++ = {logits_[i], i, 0, 0};
    }
    result.num_top = static_cast<int32_t>(std::min<int64_t>(count, end - begin));
    std::partial_sort(begin, begin + result.num_top, end, ranks_before<SamplerScratch::Candidate>);
    for (int32_t i = 0; i < result.num_top; ++i)
      result.top[i] = {begin[i].token, static_cast<float>(begin[i].logit - log_sum_)};
  }

 private:
  SamplerScratch& scratch_;
  const float* logits_;
  const int32_t size_;
  const double log_sum_;
};

// One call of sample_row.
class RowSampler {
 public:
  RowSampler(const SampleRow& row, SamplerScratch& scratch)
      : row_(row), params_(*row.params), scratch_(scratch), size_(scratch.vocab_size()), logits_(row.logits) {}

  void run(SampleResult& result) {
    result.token = -1;
    result.logprob = 0;
    result.rank = 0;
    result.num_top = 0;
    RowScan scan = scan_row(logits_, size_, scratch_.block_max_.get());
    result.failed = !scan.finite || scan.max == -kInfinity;
    if (result.failed) return;

    std::optional<RowLogprobs> logprobs;
    if (params_.logprobs >= 0) {
      logprobs.emplace(row_.logits, scratch_, scan.max);
      logprobs->find_top(params_.logprobs, result);
    }
    if (changes_logits(row_)) {
      logits_ = scratch_.logits_.get();
      process_logits(row_, size_, scratch_.logits_.get());
      scan = scan_row(logits_, size_, scratch_.block_max_.get());
      result.failed = scan.max == -kInfinity;
      if (result.failed) {
        result.num_top = 0;
        return;
      }
    }
    result.token =
        params_.is_greedy() ? first_max(logits_, size_, scratch_.block_max_.get(), scan.max) : draw(scan.max);
    if (logprobs) logprobs->find(result.token, result);
  }

 private:
  using Candidate = SamplerScratch::Candidate;
  using Bucket = SamplerScratch::Bucket;
  enum class Measure { kCount, kWeight };

  // The shortest run of candidates by rank that reaches a target.
  struct Prefix {
    TokenId last = 0;
    double weight = 0;
  };

  // At least `count` logits reach this.
  float bound_of_largest(int32_t count) {
    return lower_bound_of_largest(scratch_.block_max_.get(), num_row_blocks(size_), count,
                                  scratch_.block_buffer_.get());
  }

  TokenId draw(float max) {
    const float scale = params_.logit_scale();
    const double number = uniform(row_.seed, row_.sample_index, row_.position);
    const int32_t top_k = params_.top_k > 0 && params_.top_k < size_ ? params_.top_k : 0;
    if (top_k == 0 && params_.top_p >= 1 && params_.min_p <= 0) return draw_uncut(max, scale, number);

    // Of which a token keeps min_p of the likeliest one's probability.
    const auto farthest = static_cast<float>(params_.min_p > 0 ? -std::log(params_.min_p) : kInfinity);
    double kept_weight;
    if (top_k != 0) {
      find_candidates(max, scale, std::min(farthest, (max - bound_of_largest(top_k)) * scale));
      kept_weight = find_prefix(Measure::kCount, top_k).weight;
    } else if (params_.min_p > 0) {
      find_candidates(max, scale, farthest);
      kept_weight = find_prefix(Measure::kCount, size_).weight;
    } else {
      // Tokens of weight below (1 - top_p) * total / size together hold less than 1 - top_p, so none of them is needed.
      kept_weight = exp_sum(logits_, size_, max, scale, scratch_.block_sum_.get());
      const double needed = (1 - params_.top_p) * kept_weight / size_;
      find_candidates(max, scale, static_cast<float>(0.01 - std::log(needed)));
    }
    if (params_.top_p < 1) kept_weight = find_prefix(Measure::kWeight, params_.top_p * kept_weight).weight;
    return find_prefix(Measure::kWeight, number * kept_weight).last;
  }

  TokenId draw_uncut(float max, float scale, double number) {
    double* block_sum = scratch_.block_sum_.get();
    double remaining = number * exp_sum(logits_, size_, max, scale, block_sum);
    // Should rounding carry the search past the end, the last token of some weight is it.
    int32_t block = 0;
    for (int32_t b = 0; b < num_row_blocks(size_); ++b) {
      if (block_sum[b] == 0) continue;
      block = b;
      if (block_sum[b] >= remaining) break;
      remaining -= block_sum[b];
    }
    float terms[kRowBlock];
    exp_block(logits_, size_, block, max, scale, terms);
    int32_t token = 0;
    for (int32_t i = 0; i < kRowBlock; ++i) {
      if (terms[i] == 0) continue;
      token = i;
      if (terms[i] >= remaining) break;
      remaining -= terms[i];
    }
    return block * kRowBlock + token;
  }

  // Collects every token of distance (max - logit) * scale up to `farthest`, by id, and fills the buckets.
  void find_candidates(float max, float scale, float farthest) {
    farthest = std::clamp(farthest, 0.0f, kMaxDistance);
    std::fill(std::begin(scratch_.buckets_), std::end(scratch_.buckets_), Bucket{0, 0});
    Candidate* candidates = scratch_.candidates_.get();
    float terms[kRowBlock];
    for (int32_t block = 0; block < num_row_blocks(size_); ++block) {
      if (!((max - scratch_.block_max_[block]) * scale <= farthest)) continue;
      exp_block(logits_, size_, block, max, scale, terms);
      const int32_t begin = block * kRowBlock;
      // Every token is written and most are overwritten by the next: without a branch that would be mispredicted.
      for (int32_t i = begin; i < std::min(size_, begin + kRowBlock); ++i) {
        const float distance = (max - logits_[i]) * scale;
        candidates[num_candidates_] = {logits_[i], i, terms[i - begin], 0};
        num_candidates_ += distance <= farthest;
      }
    }
    for (int32_t i = 0; i < num_candidates_; ++i) {
      const float distance = (max - candidates[i].logit) * scale;
      const auto position = static_cast<int32_t>(distance * (SamplerScratch::kNumBuckets / kMaxDistance));
      const int32_t bucket = std::min(position, SamplerScratch::kNumBuckets - 1);
      candidates[i].bucket = bucket;
      scratch_.buckets_[bucket].count += 1;
      scratch_.buckets_[bucket].weight += candidates[i].weight;
      last_bucket_ = std::max(last_bucket_, bucket);
    }
  }

  // Once this has cut, later calls with a target within what was kept add up the same sums in the same order: they end
  // at the cut or before.
  Prefix find_prefix(Measure measure, double target) {
    double reached = 0;
    Prefix prefix;
    int32_t bucket = 0;
    for (; bucket < last_bucket_; ++bucket) {
      const Bucket& content = scratch_.buckets_[bucket];
      const double next = reached + (measure == Measure::kCount ? content.count : content.weight);
      if (next >= target) break;
      reached = next;
      prefix.weight += content.weight;
    }
    last_bucket_ = bucket;
    Candidate* const begin = scratch_.candidates_.get();
    Candidate* const end = std::partition(begin, begin + num_candidates_,
                                          [bucket](const Candidate& candidate) { return candidate.bucket == bucket; });
    std::sort(begin, end, ranks_before<Candidate>);
    // Should rounding keep the target out of reach, the last candidate is it.
    for (const Candidate* candidate = begin; candidate != end; ++candidate) {
      reached += measure == Measure::kCount ? 1 : candidate->weight;
      prefix.weight += candidate->weight;
      prefix.last = candidate->token;
      if (reached >= target) break;
    }
    return prefix;
  }

  const SampleRow& row_;
  const SamplingParams& params_;
  SamplerScratch& scratch_;
  const int32_t size_;
  const float* logits_;  // the row, or what process_logits made of it
  int32_t num_candidates_ = 0;
  int32_t last_bucket_ = 0;  // the last one that is not empty, or in which a cut fell
};

void score_row(const float* logits, SamplerScratch& scratch, const ScoredToken& token) {
  SampleResult& result = *token.result;
  result.token = token.token;
  const RowScan scan = scan_row(logits, scratch.vocab_size(), scratch.block_max_.get());
  result.failed = !scan.finite || scan.max == -kInfinity;
  if (result.failed) {
    result.logprob = std::numeric_limits<float>::quiet_NaN();
    result.rank = result.num_top = 0;
    return;
  }
  const RowLogprobs logprobs(logits, scratch, scan.max);
  logprobs.find_top(token.num_top, result);
  logprobs.find(token.token, result);
}

void sample_row(const SampleRow& row, SamplerScratch& scratch, SampleResult& result) {
  RowSampler(row, scratch).run(result);
}

}  // namespace steploop
