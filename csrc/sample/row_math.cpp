// Passes over one row of logits, in a form that compilers vectorise: plain loops over blocks and 16 lanes.
#include "sample/row_math.h"

#include <algorithm>
#include <functional>
#include <limits>

namespace steploop {
namespace {

constexpr int kLanes = 16;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Block b of the row. The last, partial one is copied into `padded` and filled up with -inf, whose exponential is 0.
const float* load_block(const float* row, int32_t size, int32_t block, float* padded) {
  const int32_t begin = block * kRowBlock;
  if (begin + kRowBlock <= size) return row + begin;
  std::fill(std::copy(row + begin, row + size, padded), padded + kRowBlock, -kInfinity);
  return padded;
}

inline float larger(float a, float b) { return a > b ? a : b; }

inline float block_maximum(const float* x) {
  float lane[kLanes];
  for (int i = 0; i < kLanes; ++i)
    lane[i] = larger(larger(x[i], x[i + kLanes]), larger(x[i + 2 * kLanes], x[i + 3 * kLanes]));
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lane[i] = larger(lane[i], lane[i + half]);
  return lane[0];
}

inline bool has_nan(const float* x) {
  int32_t found = 0;
  for (int i = 0; i < kRowBlock / 2; ++i) found |= __builtin_isunordered(x[i], x[i + kRowBlock / 2]);
  return found != 0;
}

inline float exp_terms(const float* x, float max, float scale, float* terms) {
  for (int i = 0; i < kRowBlock; ++i) terms[i] = exp_nonpositive((x[i] - max) * scale);
  float lane[kLanes];
  for (int i = 0; i < kLanes; ++i)
    lane[i] = (terms[i] + terms[i + kLanes]) + (terms[i + 2 * kLanes] + terms[i + 3 * kLanes]);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
  return lane[0];
}

}  // namespace

RowScan scan_row(const float* row, int32_t size, float* block_max) {
  alignas(64) float padded[kRowBlock];
  float max = -kInfinity;
  bool nan = false;
  for (int32_t block = 0; block < num_row_blocks(size); ++block) {
    const float* x = load_block(row, size, block, padded);
    nan |= has_nan(x);
    block_max[block] = block_maximum(x);
    max = larger(block_max[block], max);
  }
  return {max, !nan && max != kInfinity};
}

int32_t first_max(const float* row, int32_t size, const float* block_max, float max) {
  const auto block = static_cast<int32_t>(std::find(block_max, block_max + num_row_blocks(size), max) - block_max);
  return static_cast<int32_t>(std::find(row + block * kRowBlock, row + size, max) - row);
}

double exp_sum(const float* row, int32_t size, float max, float scale, double* block_sum) {
  alignas(64) float terms[kRowBlock];
  double sum = 0;
  for (int32_t block = 0; block < num_row_blocks(size); ++block) {
    block_sum[block] = exp_block(row, size, block, max, scale, terms);
    sum += block_sum[block];
  }
  return sum;
}

double exp_block(const float* row, int32_t size, int32_t block, float max, float scale, float* terms) {
  alignas(64) float padded[kRowBlock];
  return exp_terms(load_block(row, size, block, padded), max, scale, terms);
}

float lower_bound_of_largest(const float* block_max, int32_t num_blocks, int32_t count, float* buffer) {
  if (count > num_blocks) return -kInfinity;
  std::copy(block_max, block_max + num_blocks, buffer);
  std::nth_element(buffer, buffer + (count - 1), buffer + num_blocks, std::greater<>());
  return buffer[count - 1];
}

}  // namespace steploop
