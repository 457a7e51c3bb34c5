// The sampler: one block makes one row of logits a token, with the meaning of sample/sampler.h.
//
// Nothing is sorted. A token's weight is exp((logit - max) * scale) as a whole number of units of 2^-44: sums of them are
// exact in any order, so atomics may form them and still every run gives the same token. Its rank is a number too: the
// logit's bits, mapped so that larger logits come first, then the id. The end of the shortest prefix of the ranks that
// holds some amount (of tokens, of weight) is found digit by digit from histograms of the amounts; this serves top_k,
// top_p and the draw. Tokens that may matter are first gathered in shared memory if they fit there, as they mostly do.
#include <cfloat>
#include <cmath>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/sample.cuh"
#include "sample/philox.h"

namespace steploop::cuda {
namespace {

using namespace sampling;

constexpr int kMaxGathered = 1536;
static_assert(kMaxGathered >= kThreads && kMaxMaskedTokens <= kThreads);

struct Candidate {
  float logit;
  int32_t token;
};

struct Shared {
  Histogram first_digit;  // of weights; kept, so that the draw need not repeat top_p's
  Histogram digit;  // all 0 between its uses
  Candidate candidates[kMaxGathered];
  uint64_t warp_best[kWarps];
  uint64_t warp_full_weight[kWarps];
  uint64_t warp_weight[kWarps];
  ScanScratch scan;
  uint32_t num_candidates;
  float saved[kMaxMaskedTokens];
};

class RowSampler {
 public:
  __device__ __forceinline__ RowSampler(const SampleBatchParams& batch, int32_t row)
      : shared_(*shared_memory<Shared>()),
        params_(batch.rows[row]),
        row_(batch.logits + int64_t{row} * batch.vocab_size),
        size_(batch.vocab_size),
        masked_token_(this_thread() < params_.num_masked ? batch.masked_tokens[params_.first_masked + this_thread()]
                                                         : -1),
        aligned_(reinterpret_cast<uintptr_t>(row_) % 16 == 0) {}

  __device__ __forceinline__ SampledToken run() {
    const bool greedy = params_.scale == 0 || params_.top_k == 1;
    if (!greedy) clear_shared();
    mask();
    find_max();
    SampledToken out;
    if (best_ == 0 || max_ == -INFINITY) {
      out.failed = 1;
    } else {
      out.token = greedy ? static_cast<TokenId>(best_ & (kMaxVocab - 1)) : draw();
      if (params_.want_logprob) out.logprob = logprob(out.token);
    }
    // All reads of masked logits lie before the last barrier.
    if (masked_token_ >= 0) row_[masked_token_] = shared_.saved[this_thread()];
    return out;
  }

 private:
  enum class Amount { kCount, kWeight };

  struct Prefix {
    uint64_t rank;  // the leading digits of the rank it ends with
    uint64_t before;  // amount of the ranks before all that have these digits
    uint64_t target;
    bool reached;  // false: all ranks together hold less; the target is what they hold then
  };

  __device__ __forceinline__ int num_chunks() const { return (size_ + kChunk - 1) / kChunk; }

  // visit(chunk, x): x[j] is the logit of token_of(chunk, j), -inf past the end. By whole warps.
  template <class Visit>
  __device__ __forceinline__ void for_each_chunk(int first, int end, Visit visit) const {
    for (int chunk = first + this_warp(); chunk < end; chunk += kWarps) {
      float x[kPerLane];
#pragma unroll
      for (int j = 0; j < kPerLane; j += 4) load(token_of(chunk, j), x + j);
      visit(chunk, x);
    }
  }

  static __device__ __forceinline__ int token_of(int chunk, int j) {
    return chunk * kChunk + j / 4 * 128 + this_lane() * 4 + j % 4;
  }

  __device__ __forceinline__ void load(int token, float* x) const {
    if (aligned_ && token + 4 <= size_) {
      const uint4 bits = *reinterpret_cast<const uint4*>(row_ + token);
      x[0] = __uint_as_float(bits.x);
      x[1] = __uint_as_float(bits.y);
      x[2] = __uint_as_float(bits.z);
      x[3] = __uint_as_float(bits.w);
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) x[j] = token + j < size_ ? row_[token + j] : -INFINITY;
    }
  }

  // visit(logit, token) for the candidates: all tokens of logit >= lowest_, of the given chunks if none are gathered.
  template <class Visit>
  __device__ __forceinline__ void for_each_candidate(int first_chunk, int end_chunk, Visit visit) const {
    if (num_gathered_ >= 0) {
      for (int i = this_thread(); i < num_gathered_; i += kThreads) {
        const Candidate candidate = shared_.candidates[i];
        if (candidate.logit >= lowest_) visit(candidate.logit, candidate.token);
      }
    } else {
      for_each_chunk(first_chunk, end_chunk, [&](int chunk, const float* x) {
#pragma unroll
        for (int j = 0; j < kPerLane; ++j)
          if (x[j] >= lowest_) visit(x[j], token_of(chunk, j));
      });
    }
  }

  // For draw(), which comes after find_max's barrier.
  __device__ __forceinline__ void clear_shared() {
    for (int i = this_thread(); i < kBins; i += kThreads) {
      shared_.first_digit.low[i] = shared_.first_digit.high[i] = 0;
      shared_.digit.low[i] = shared_.digit.high[i] = 0;
    }
    if (this_thread() == 0) shared_.num_candidates = 0;
  }

  __device__ __forceinline__ void mask() {
    if (params_.num_masked == 0) return;
    if (masked_token_ >= 0) {
      float& logit = row_[masked_token_];
      shared_.saved[this_thread()] = logit;
      logit = -INFINITY;
    }
    __syncthreads();
  }

  // The first rank, or 0 if a NaN or +inf is in the row.
  __device__ __forceinline__ void find_max() {
    thread_max_ = -INFINITY;
    int token = 0;
    bool finite = true;
    for_each_chunk(0, num_chunks(), [&](int chunk, const float* x) {
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) {
        finite &= x[j] < INFINITY;
        if (x[j] > thread_max_) {
          thread_max_ = x[j];
          token = token_of(chunk, j);
        }
      }
    });
    if (masked_token_ >= 0) finite &= shared_.saved[this_thread()] < INFINITY;
    best_ = block_reduce(finite ? rank_of(thread_max_, token) : 0, shared_.warp_best,
                         [](uint64_t a, uint64_t b) { return a < b ? a : b; });
    max_ = logit_of(static_cast<uint32_t>(best_ >> kIdBits));
  }

  __device__ __forceinline__ uint64_t row_weight(float max, float scale) const {
    uint64_t weight = 0;
    for_each_chunk(0, num_chunks(), [&](int, const float* x) {
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) weight += sampling::weight_of(x[j], max, scale);
    });
    return weight;
  }

  // Of the row with its masked tokens.
  __device__ __forceinline__ float logprob(int32_t token) {
    float max = max_;
    for (int i = 0; i < params_.num_masked; ++i) max = fmaxf(max, shared_.saved[i]);
    if (total_ == 0 || params_.scale != 1 || params_.num_masked != 0) {
      uint64_t weight = row_weight(max, 1);
      if (masked_token_ >= 0) weight += sampling::weight_of(shared_.saved[this_thread()], max, 1);
      total_ = block_sum(weight, shared_.warp_full_weight);
    }
    if (this_thread() != 0) return 0;
    return static_cast<float>(row_[token] - (max + log(static_cast<double>(total_) / kUnits)));
  }

  __device__ __forceinline__ uint64_t weight_of(float logit) const {
    return sampling::weight_of(logit, max_, params_.scale);
  }

  __device__ __forceinline__ int32_t draw() {
    const double number = uniform(params_.seed, params_.sample_index, params_.position);
    const int top_k = params_.top_k > 0 && params_.top_k < size_ ? params_.top_k : 0;
    if (top_k == 0 && params_.top_p >= 1) return draw_uncut(number);

    lowest_ = lowest_of_weight(1);
    if (top_k != 0) {
      raise_lowest_to_top(top_k);
    } else {
      total_ = block_sum(row_weight(max_, params_.scale), shared_.warp_weight);
      // Tokens of less weight than this together hold half of what top_p leaves out, at most.
      lowest_ = lowest_of_weight(0.5 * (1 - params_.top_p) * static_cast<double>(total_) / size_);
    }
    gather_candidates();
    uint64_t kept = top_k != 0 ? weight_of_top(top_k) : total_;
    if (params_.top_p < 1) {
      const Prefix prefix = find_prefix(Amount::kWeight, share_of(params_.top_p, kept), kKeyDigits);
      const uint64_t weight = weight_of(logit_of(static_cast<uint32_t>(prefix.rank)));
      kept = prefix.before + (prefix.target - prefix.before + weight - 1) / weight * weight;
    }
    const Prefix prefix = find_prefix(Amount::kWeight, share_of(number, kept), kDigits);
    return static_cast<int32_t>(prefix.rank & (kMaxVocab - 1));
  }

  // By id: the chunk, then the place in it.
  __device__ __forceinline__ int32_t draw_uncut(double number) {
    for_each_chunk(0, num_chunks(), [&](int chunk, const float* x) {
      uint64_t weight = 0;
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) weight += weight_of(x[j]);
      for (int distance = 16; distance > 0; distance /= 2) weight += __shfl_xor_sync(kFullWarp, weight, distance);
      if (this_lane() == 0) {
        shared_.first_digit.low[chunk] = static_cast<uint32_t>(weight);
        shared_.first_digit.high[chunk] = static_cast<uint32_t>(weight >> 32);
      }
    });
    __syncthreads();
    const Scan chunks = scan(shared_.first_digit, false, shared_.scan);
    total_ = chunks.total;
    uint64_t target = share_of(number, total_);
    const Place chunk = find(chunks, target, shared_.scan);
    for_each_chunk(chunk.bin, chunk.bin + 1, [&](int, const float* x) {
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) add(shared_.digit, token_of(0, j), weight_of(x[j]));
    });
    __syncthreads();
    return chunk.bin * kChunk + find(scan(shared_.digit, false, shared_.scan), target - chunk.before, shared_.scan).bin;
  }

  // No logit below this has a weight of `units` or more. Rounded down generously, so that no error of these few
  // operations or of the weights themselves matters.
  __device__ __forceinline__ float lowest_of_weight(double units) const {
    const float distance = 0.01f + logf(kUnits / static_cast<float>(units < 1 ? 1 : units));
    const double lowest = static_cast<double>(max_) - static_cast<double>(distance) / params_.scale;
    return fmaxf(static_cast<float>(lowest - fabs(lowest) * 1e-6), -FLT_MAX);
  }

  // `count` threads' maxima reach the count-th largest of them.
  __device__ __forceinline__ void raise_lowest_to_top(int count) {
    shared_.candidates[this_thread()] = {thread_max_, this_thread()};  // each thread will read its own
    num_gathered_ = kThreads;
    const Prefix prefix = find_prefix(Amount::kCount, count, kKeyDigits);
    if (prefix.reached) lowest_ = logit_of(static_cast<uint32_t>(prefix.rank));
    num_gathered_ = -1;
  }

  // Gives up early if there are too many.
  __device__ __forceinline__ void gather_candidates() {
    bool full = false;
    for_each_chunk(0, num_chunks(), [&](int chunk, const float* x) {
      int count = 0;
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) count += x[j] >= lowest_;
      if (count == 0 || full) return;
      uint32_t place = atomicAdd(&shared_.num_candidates, static_cast<uint32_t>(count));
      full = place + count > kMaxGathered;
      if (full) return;
#pragma unroll
      for (int j = 0; j < kPerLane; ++j)
        if (x[j] >= lowest_) shared_.candidates[place++] = {x[j], token_of(chunk, j)};
    });
    __syncthreads();
    if (shared_.num_candidates <= kMaxGathered) num_gathered_ = static_cast<int>(shared_.num_candidates);
  }

  __device__ __forceinline__ uint64_t weight_of_top(int count) {
    const Prefix prefix = find_prefix(Amount::kCount, count, kKeyDigits);
    const auto key = static_cast<uint32_t>(prefix.rank);
    uint64_t weight = 0;
    for_each_candidate(0, num_chunks(), [&](float logit, int) {
      if (key_of(logit) < key) weight += weight_of(logit);
    });
    return block_sum(weight, shared_.warp_weight) + (prefix.target - prefix.before) * weight_of(logit_of(key));
  }

  __device__ __forceinline__ Prefix find_prefix(Amount measure, uint64_t target, int num_digits) {
    Prefix prefix = {0, 0, target, true};
    int prefix_shift = kRankBits;
#pragma unroll 1
    for (int digit = 0; digit < num_digits; ++digit) {
      const int shift = digit_shift(digit);
      const uint64_t base = prefix.rank << (prefix_shift - shift);
      const uint64_t num_bins = uint64_t{1} << (prefix_shift - shift);
      const bool keep = digit == 0 && measure == Amount::kWeight;
      Histogram& histogram = keep ? shared_.first_digit : shared_.digit;
      if (!keep || !first_digit_known_) {
        const bool one_chunk = digit == kDigits - 1;
        const int first_chunk = one_chunk ? static_cast<int>(prefix.rank % kBins) : 0;
        for_each_candidate(first_chunk, one_chunk ? first_chunk + 1 : num_chunks(), [&](float logit, int token) {
          const uint64_t bin = (rank_of(logit, token) >> shift) - base;
          if (bin < num_bins)
            add(histogram, static_cast<uint32_t>(bin), measure == Amount::kCount ? 1 : weight_of(logit));
        });
        __syncthreads();
        first_digit_known_ |= keep;
      }
      const Scan sums = scan(histogram, !keep, shared_.scan);
      if (digit == 0 && sums.total < target) {
        prefix.reached = false;
        prefix.target = sums.total;
      }
      const Place place = find(sums, prefix.target - prefix.before, shared_.scan);
      prefix.rank = base + place.bin;
      prefix.before += place.before;
      prefix_shift = shift;
    }
    return prefix;
  }

  Shared& shared_;
  const SampleRowParams& params_;
  float* const row_;
  const int size_;
  const TokenId masked_token_;  // the one that this thread masks, or -1
  const bool aligned_;
  float thread_max_;
  uint64_t best_;
  float max_;
  float lowest_;
  uint64_t total_ = 0;  // weight of the whole row; 0: not known
  int num_gathered_ = -1;  // candidates in shared memory; -1: they are in the row
  bool first_digit_known_ = false;
};

__global__ void __launch_bounds__(kThreads, 2) sample_kernel(SampleBatchParams batch) {
  const int32_t row = batch.row_indices != nullptr ? batch.row_indices[blockIdx.x] : static_cast<int32_t>(blockIdx.x);
  const SampledToken out = RowSampler(batch, row).run();
  if (this_thread() == 0) batch.out[row] = out;
}

}  // namespace

int sample(const SampleBatchParams& params, CudaStream stream) {
  if (params.vocab_size < 1 || params.vocab_size > kMaxVocab || params.num_sampled < 0) return cudaErrorInvalidValue;
  return launch(sample_kernel, dim3(params.num_sampled), dim3(kThreads), sizeof(Shared), stream, params);
}

}  // namespace steploop::cuda
